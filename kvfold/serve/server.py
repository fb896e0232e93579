"""The uvicorn server of a service, with graceful shutdown on SIGINT and SIGTERM.

After the signal no new request is accepted, and running replies have a part of `shutdown_s` to finish:

    signal …… 0.4 …………………………… 0.7 ……………………………………… 1.0 of shutdown_s
    | replies end  | jobs are cancelled | requests are cancelled, all is closed | the process is killed, code 1

The kill comes from a thread that needs neither the event loop nor the GIL (faulthandler), so no forward pass, store or
client can delay it; it prints every thread's stack to stderr. A second signal ends the process at once.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import NoReturn

from kvfold.errors import MissingExtra
from kvfold.serve.app import App
from kvfold.serve.connections import BACKLOG, Connection, ConnectionLimit, most_connections
from kvfold.serve.middleware import OnDone
from kvfold.serve.service import Service

try:
    import uvicorn
except ImportError as error:
    raise MissingExtra("the server needs Starlette and uvicorn; run: pip install 'kvfold[serve]'") from error

_TO_END, _TO_CLOSE = 0.4, 0.7  # shares of shutdown_s


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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Jobs still running are cancelled in time for their clients to get the reason."""
        seconds = _TO_END * self._service.settings.limits.shutdown_s
        asyncio.get_running_loop().call_later(seconds, self._service.scheduler.close, 0.0)
        await super().shutdown(sockets)
