"""KV events of a server: where they are published, checked before a model is loaded, and counted in /metrics.

Replicas publish at consecutive ports, as data-parallel ranks of vLLM do. Events hold the token ids of prompts, so
addresses that other machines can reach have to be asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING

from kvfold.errors import InputError, MissingExtra

if TYPE_CHECKING:
    from kvfold.serve.service import Service
    from kvfold.store.kv_events.publisher import KvEventPublisher

_TCP = re.compile(r"(tcp://(?:\[([0-9a-fA-F:]+)\]|([0-9.]+|\*))):([0-9]{1,5})")
_NO_PORT = 1 << 16


@dataclass(frozen=True)
class KvEventsConfig:
    """`is_remote`: other machines may reach the addresses."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    is_remote: bool = False

    def check(self, count: int = 1) -> None:
        """InputError if so many replicas cannot publish there."""
        ports = [port for port in map(self._port, self._endpoints) if port is not None]
        if 0 in ports:
            raise InputError("KV events at port 0 would be at any free one, which no subscriber knows; give a port")
        if len(ports) > 1 and abs(ports[0] - ports[1]) < count:
            raise InputError(_same_port(ports[0]) if count == 1 else _overlap(ports[0], ports[1], count))
        if any(port + count > _NO_PORT for port in ports):
            needed = "a port" if count == 1 else f"{count} ports, one for each replica,"
            raise InputError(f"KV events need {needed} up to 65535; choose a lower number")

    @property
    def _endpoints(self) -> list[str]:
        return [one for one in (self.endpoint, self.replay_endpoint) if one is not None]

    def _port(self, endpoint: str) -> int | None:
        """None for a path."""
        found = _TCP.fullmatch(endpoint)
        if endpoint.startswith("ipc:///"):
            return None
        host = None if found is None else found[2] or found[3]
        try:
            is_local = host != "*" and host is not None and ip_address(host).is_loopback
        except ValueError:
            host = None
        if found is None or host is None:
            raise InputError(f'KV events: "{endpoint}" is no address; write tcp://127.0.0.1:5557 or ipc:///PATH')
        if not is_local and not self.is_remote:
            raise InputError(
                f"KV events at {endpoint} can be read by other machines, and hold the token ids of all prompts; "
                "write tcp://127.0.0.1:PORT, or add --kv-events-remote"
            )
        return int(found[4])

    def of_replica(self, number: int) -> KvEventsConfig:
        replay = self.replay_endpoint
        moved = None if replay is None else _moved(replay, number)
        return replace(self, endpoint=_moved(self.endpoint, number), replay_endpoint=moved)


def _same_port(port: int) -> str:
    return f"KV events are published and replayed at the same port {port}; choose another one for --kv-events-replay"


def _overlap(port: int, replay_port: int, count: int) -> str:
    return (
        f"{count} replicas publish KV events at ports {port} to {port + count - 1}, and replay them at "
        f"{replay_port} to {replay_port + count - 1}; choose ports that are {count} apart"
    )


def _moved(endpoint: str, number: int) -> str:
    """By so many ports, or to a path of its own."""
    found = _TCP.fullmatch(endpoint)
    if found is None:
        return f"{endpoint}-{number}" if number else endpoint
    return f"{found[1]}:{int(found[4]) + number}"


@contextmanager
def publisher_of(config: KvEventsConfig | None, number: int = 0) -> Iterator[KvEventPublisher | None]:
    """Of the replica with this number; it is closed at the end, after what it publishes."""
    if config is None:
        yield None
        return
    mine = config.of_replica(number)
    try:
        from kvfold.store.kv_events.publisher import KvEventPublisher
    except ModuleNotFoundError as error:
        raise MissingExtra(f"KV events need {error.name}; run: pip install 'kvfold[events]'") from error
    publisher = KvEventPublisher(mine.endpoint, mine.replay_endpoint, topic=mine.topic, rank=number)
    try:
        yield publisher
    finally:
        publisher.close()


def publish_blocks(service: Service, publisher: KvEventPublisher) -> None:
    """Events of the service's prefix store, counted in its metrics."""
    if service.store is not None:
        service.store.publish_blocks(publisher.publish)
    counter = service.metrics.counter
    counter("kvfold_kv_events_total", "KV events published.", lambda: publisher.num_published)
    text = "KV events dropped: by a full queue, or for a subscriber that reads too slowly."
    counter("kvfold_kv_events_dropped_total", text, lambda: publisher.num_dropped)
