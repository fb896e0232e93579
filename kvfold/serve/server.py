"""The HTTP server of one model under one policy: prefix store, service, listening socket, graceful shutdown.

After SIGINT or SIGTERM no new request is accepted, and running replies have a part of `shutdown_s` to finish:

    signal …… 0.4 …………………………… 0.7 ……………………………………… 1.0 of shutdown_s
    | replies end  | jobs are cancelled | requests are cancelled, all is closed | the process is killed, code 1

The kill comes from a thread that needs neither the event loop nor the GIL (faulthandler), so no forward pass, store or
client can delay it; it prints every thread's stack to stderr. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn
from urllib.parse import urlsplit

import uvicorn

from kvfold.errors import InputError, KvfoldWarning
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.serve.app import App
from kvfold.serve.batch_send import prepare
from kvfold.serve.connections import BACKLOG, Connection, ConnectionLimit, most_connections
from kvfold.serve.garbage import rare_collections
from kvfold.serve.local_service import LocalService
from kvfold.serve.middleware import OnDone
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings
from kvfold.store import DeviceTier, DiskTier, HostTier, PrefixStore, Quarantine, RedisTier
from kvfold.store.tiers.base import ByteTier

_TO_END, _TO_CLOSE = 0.4, 0.7  # shares of shutdown_s
_HOST_BYTES = 4 << 30
_MARKER_BYTES = 16 << 20  # where no prefix is copied to the host, cache markers are kept there: some 50,000


def end_process(code: int) -> NoReturn:
    """Exit without interpreter teardown, which would take seconds; the caller has closed everything."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe
            stream.flush()
    os._exit(code)


class Server(uvicorn.Server):
    """`on_start` is called when requests are accepted, `on_done` with the trace of each finished one."""

    def __init__(self, service: Service, on_done: OnDone, on_start: Callable[[], None] = lambda: None) -> None:
        limits = service.settings.limits
        limit = ConnectionLimit(limits, most_connections(limits.connections))
        config = uvicorn.Config(
            App(service, on_done).asgi(on_start=on_start),
            port=0,
            http=partial(Connection, limit=limit),  # type: ignore[arg-type]
            ws="none",
            backlog=BACKLOG,
            log_level="warning",
            access_log=False,
            proxy_headers=False,  # nothing asks for the client's address
            timeout_graceful_shutdown=max(1, int(_TO_CLOSE * limits.shutdown_s)),
        )
        super().__init__(config)
        self.exit_code = 0
        self._service = service
        service.on_failure = self._fail

    def end_on_signals(self) -> None:
        """Until the process ends: closing the store after the server can be interrupted as well."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's would re-raise captured signals before the store is closed."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self._begin_end()

    def _fail(self) -> None:
        """The scheduler has failed: shut down, so that a supervisor restarts the process."""
        self.exit_code = 1
        self._begin_end()

    def _begin_end(self) -> None:
        self._service.is_closing = True
        self.should_exit = True
        faulthandler.dump_traceback_later(self._service.settings.limits.shutdown_s, exit=True)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        with rare_collections():
            await super().serve(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Jobs still running are cancelled in time for their clients to get the reason."""
        seconds = _TO_END * self._service.settings.limits.shutdown_s
        asyncio.get_running_loop().call_later(seconds, self._service.scheduler.close, 0.0)
        await super().shutdown(sockets)


def open_store(
    model: Model,
    *,
    host_bytes: int | None = None,
    disk: str | Path | None = None,
    disk_bytes: int = 0,
    redis: str | None = None,
    form: str = "exact",
    secret: bytes = b"",
) -> PrefixStore:
    """Tiers, fastest first; cached prefixes use up to half of the arena and are evicted when requests need it.

    `host_bytes` is 4 GB by default. On a CPU, whose arena is host memory, no prefix is copied to the same memory again
    unless that or another tier is asked for.
    """
    offload = model.device.type != "cpu" or any(option is not None for option in (host_bytes, disk, redis))
    default_bytes = _HOST_BYTES if offload else _MARKER_BYTES
    tiers: list[ByteTier] = [HostTier(default_bytes if host_bytes is None else host_bytes)]
    quarantine = None
    if disk is not None:
        tiers.append(DiskTier(disk, disk_bytes))
        quarantine = Quarantine(Path(disk) / "quarantine")
    if redis is not None:
        tiers.append(_redis_tier(redis))
    device = DeviceTier(max(model.arena.capacity_bytes // 2, 1))
    return PrefixStore(tiers, device=device, offload=offload, quarantine=quarantine, form=form, secret=secret)


def _redis_tier(url: str) -> RedisTier:
    """A KvfoldWarning tells that no server answers; the URL may hold a password, which is not shown."""
    tier = RedisTier(url)
    if not tier.answers():
        parts = urlsplit(url)
        where = parts.path if parts.hostname is None else f"{parts.hostname}:{parts.port or 6379}"
        message = f"Redis at {where} does not answer: its tier is skipped until it does"
        warnings.warn(message, KvfoldWarning, stacklevel=1)
    return tier


@contextmanager
def service_of(model: Model, policy: str | Policy, settings: Settings, store: PrefixStore) -> Iterator[LocalService]:
    """A service; its scheduler and store are closed on exit."""
    try:
        service = LocalService(model, policy, settings, store)
        try:
            yield service
        finally:
            service.close()
    finally:
        store.close()


def check_address(host: str, port: int) -> None:
    """InputError if no server can listen there now."""
    listen(host, port).close()


def listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except (OSError, UnicodeError) as error:
        code = getattr(error, "errno", None)
        if code in (errno.EADDRINUSE, errno.EACCES):
            reason = f"cannot listen at {host}:{port} ({os.strerror(code)}); choose another --port"
        else:
            reason = f'--host "{host}" is no IPv4 address of this machine; 127.0.0.1 is, and 0.0.0.0 binds all of them'
        raise InputError(reason) from error


def serve(service: Service, host: str, port: int, started: Callable[[int], None], on_done: OnDone) -> int:
    """Serve until interrupted; `started` is called with the port once requests are accepted, `on_done` with the trace
    of each finished request. Returns the exit code: 1 if the scheduler failed."""
    with listen(host, port) as listening:
        return serve_at(service, listening, lambda: started(listening.getsockname()[1]), on_done)


def serve_at(service: Service, listening: socket.socket, started: Callable[[], None], on_done: OnDone) -> int:
    """As `serve`, at a socket that listens already."""
    prepare()
    service.warm_up()
    gc.collect()
    server = Server(service, on_done, started)
    server.end_on_signals()
    server.run(sockets=[listening])
    return server.exit_code
