"""The parent process of `kvfold serve --replicas N`: the replicas, and the proxy at the address clients use.

After SIGINT or SIGTERM replicas end as a single server does, and their last bytes pass through the proxy, which ends
with them. A second signal kills all at once.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import uvicorn

from kvfold.serve.connections import BACKLOG, Connection, ConnectionLimit, most_connections
from kvfold.serve.replicas.fleet import Fleet
from kvfold.serve.replicas.proxy import Proxy
from kvfold.serve.settings import Settings

_GRACE_S = 1.0  # beyond the replicas' own shutdown


class ProxyServer(uvicorn.Server):
    """Signals are handled by `Parent`."""

    def __init__(self, proxy: Proxy, settings: Settings) -> None:
        limits = settings.limits
        limit = ConnectionLimit(limits, most_connections(limits.connections))
        config = uvicorn.Config(
            proxy,
            port=0,
            http=partial(Connection, limit=limit),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            backlog=BACKLOG,
            log_level="error",
            access_log=False,
            proxy_headers=False,  # replicas read them, if anybody
            server_header=False,  # answers have those of the replicas
            date_header=False,
            timeout_graceful_shutdown=max(1, int(limits.shutdown_s)),
        )
        super().__init__(config)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Parent:
    """`started` is called when all replicas take requests."""

    def __init__(self, command: Sequence[str], count: int, settings: Settings, started: Callable[[], None]) -> None:
        self._fleet = Fleet(command, count)
        self._settings, self._started = settings, started
        self._proxy = Proxy(self._fleet, settings)
        self._server = ProxyServer(self._proxy, settings)
        self._ending = asyncio.Event()

    async def run(self, listening: socket.socket) -> int:
        """Until a signal; the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        try:
            if await self._start():
                self._started()
                await self._server.serve(sockets=[listening])
            self._fleet.end()
            return await self._fleet.wait(self._settings.limits.shutdown_s + _GRACE_S)
        except BaseException:
            self._fleet.end()
            await self._fleet.wait(self._settings.limits.shutdown_s + _GRACE_S)
            raise

    async def _start(self) -> bool:
        """Whether all replicas take requests; False after a signal."""
        start, ending = asyncio.create_task(self._fleet.start()), asyncio.create_task(self._ending.wait())
        await asyncio.wait((start, ending), return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not start.done():
            start.cancel()
            return False
        start.result()
        return not self._ending.is_set()

    def _signalled(self, number: int) -> None:
        if self._ending.is_set():
            self._fleet.end(signal.SIGKILL)
            os._exit(128 + number)
        self._ending.set()
        self._proxy.together.is_closing = True
        self._server.should_exit = True
        self._fleet.end()


def serve_replicas(
    command: Sequence[str], count: int, settings: Settings, listening: socket.socket, started: Callable[[], None]
) -> int:
    """Serve until interrupted; the exit code."""

    async def main() -> int:
        return await Parent(command, count, settings, started).run(listening)

    return asyncio.run(main())
