"""A server of one model under one policy, from its options to its end."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfold.errors import InputError, MissingExtra
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.serve.app import App
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings
from kvfold.store import DeviceTier, DiskTier, HostTier, PrefixStore, Quarantine, RedisTier
from kvfold.store.tier import ByteTier

_FACTS = ("request", "tenant", "path", "status", "ms")


class JsonLines(logging.Formatter):
    """A log line as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        facts = {name: getattr(record, name) for name in _FACTS if getattr(record, name, None) is not None}
        line = {"time": self.formatTime(record), "level": record.levelname.lower(), "event": record.getMessage()}
        error = {"error": self.formatException(record.exc_info)} if record.exc_info and record.exc_info[0] else {}
        return json.dumps({**line, **facts, **error}, ensure_ascii=False)


def log_to_stderr() -> None:
    """What the server says goes to stderr, a JSON object a line."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("kvfold.serve")
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)


def open_store(
    model: Model,
    *,
    host_bytes: int,
    disk: str | Path | None = None,
    disk_bytes: int = 0,
    redis: str | None = None,
) -> PrefixStore:
    """Tiers, fastest first; up to half of the arena holds prefixes, which give way to requests."""
    tiers: list[ByteTier] = [HostTier(host_bytes)]
    quarantine = None
    if disk is not None:
        tiers.append(DiskTier(disk, disk_bytes))
        quarantine = Quarantine(Path(disk) / "quarantine")
    if redis is not None:
        tiers.append(RedisTier(redis))
    device = DeviceTier(max(model.arena.capacity_bytes // 2, 1))
    return PrefixStore(tiers, device=device, quarantine=quarantine)


@contextmanager
def service_of(model: Model, policy: str | Policy, settings: Settings, store: PrefixStore) -> Iterator[Service]:
    """A service whose scheduler and store are closed at the end."""
    try:
        service = Service(model, policy, settings, store)
        try:
            yield service
        finally:
            service.close()
    finally:
        store.close()


def serve(service: Service, host: str, port: int, started: Callable[[int], None]) -> None:
    """Until it is interrupted; `started` is told the port once requests are taken."""
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtra("the server needs Starlette and uvicorn; run: pip install 'kvfold[serve]'") from error
    try:
        listening = socket.create_server((host, port), backlog=2048)
    except OSError as error:
        raise InputError(f"nothing can listen at {host}:{port} ({error.strerror}); choose another --port") from error
    app = App(service).asgi(on_start=lambda: started(listening.getsockname()[1]))
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=10)
    with listening:
        uvicorn.Server(config).run(sockets=[listening])
