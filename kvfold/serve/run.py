"""Starts and stops the HTTP server of one model under one policy: prefix store, service, listening socket."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.serve.connections import BACKLOG
from kvfold.serve.middleware import OnDone
from kvfold.serve.server import Server
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings
from kvfold.store import DeviceTier, DiskTier, HostTier, PrefixStore, Quarantine, RedisTier
from kvfold.store.tiers.base import ByteTier


def open_store(
    model: Model,
    *,
    host_bytes: int,
    disk: str | Path | None = None,
    disk_bytes: int = 0,
    redis: str | None = None,
    form: str = "exact",
    secret: bytes = b"",
) -> PrefixStore:
    """Tiers, fastest first; cached prefixes use up to half of the arena and are evicted when requests need it."""
    tiers: list[ByteTier] = [HostTier(host_bytes)]
    quarantine = None
    if disk is not None:
        tiers.append(DiskTier(disk, disk_bytes))
        quarantine = Quarantine(Path(disk) / "quarantine")
    if redis is not None:
        tiers.append(RedisTier(redis))
    device = DeviceTier(max(model.arena.capacity_bytes // 2, 1))
    return PrefixStore(tiers, device=device, quarantine=quarantine, form=form, secret=secret)


@contextmanager
def service_of(model: Model, policy: str | Policy, settings: Settings, store: PrefixStore) -> Iterator[Service]:
    """A service; its scheduler and store are closed on exit."""
    try:
        service = Service(model, policy, settings, store)
        try:
            yield service
        finally:
            service.close()
    finally:
        store.close()


def serve(service: Service, host: str, port: int, started: Callable[[int], None], on_done: OnDone) -> int:
    """Serve until interrupted; `started` is called with the port once requests are accepted, `on_done` with the trace
    of each finished request. Returns the exit code: 1 if the scheduler failed."""
    try:
        listening = socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise InputError(f"cannot listen at {host}:{port} ({error.strerror}); choose another --port") from error
    with listening:
        server = Server(service, on_done, lambda: started(listening.getsockname()[1]))
        server.end_on_signals()
        server.run(sockets=[listening])
    return server.exit_code
