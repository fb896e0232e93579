"""A proxy that runs in a thread of the test, before replicas that are processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from threading import Thread
from typing import Any

from kvfold.serve.replicas.fleet import Fleet
from kvfold.serve.replicas.proxy import Proxy
from kvfold.serve.replicas.server import ProxyServer
from kvfold.serve.settings import Limits, Settings
from tests.serve.asking import until
from tests.serve.bodies import Answer

STUB = [sys.executable, "-m", "tests.serve.replicas.stub"]


class Proxied:
    """The address of the proxy, its replicas, and its event loop."""

    def __init__(self, fleet: Fleet, port: int, loop: asyncio.AbstractEventLoop) -> None:
        self.fleet, self.port, self._loop = fleet, port, loop

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> HTTPConnection:
        """A request that is sent and not read."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = body if body is None or isinstance(body, bytes | str) else json.dumps(body)
        connection.request(method, path, raw, {"content-type": "application/json", **(headers or {})})
        return connection

    def call(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        connection = self.ask(method, path, body, headers)
        answer = connection.getresponse()
        found = Answer(answer.status, answer.headers, answer.read().decode())
        connection.close()
        return found

    def post(self, body: Any, path: str = "/v1/messages", **headers: str) -> Answer:
        return self.call("POST", path, body, headers)

    @property
    def pids(self) -> list[int]:
        return [replica.pid for replica in self.fleet.replicas]

    def give_up(self, number: int) -> None:
        """As a health check does that gets no answer."""
        self._loop.call_soon_threadsafe(self.fleet.backends[number].give_up)

    def settle(self) -> None:
        """Wait until all are up."""
        until(lambda: all(backend.is_up for backend in self.fleet.backends))


@contextmanager
def proxied(count: int, command: Sequence[str] = STUB, **options: Any) -> Iterator[Proxied]:
    """Everything is ended afterwards."""
    settings = Settings(("tiny",), options.pop("limits", Limits()), **options)
    running: list[tuple[Fleet, ProxyServer, asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        fleet = Fleet(command, count)
        server = ProxyServer(Proxy(fleet, settings), settings)
        try:
            await fleet.start()
            running.append((fleet, server, asyncio.get_running_loop()))
            await server.serve()
        finally:
            fleet.end()
            await fleet.wait(5)

    thread = Thread(target=asyncio.run, args=(main(),), daemon=True)
    thread.start()
    try:
        until(lambda: not thread.is_alive() or bool(running and running[0][1].started))
        assert running, "the replicas did not start"
        fleet, server, loop = running[0]
        yield Proxied(fleet, server.servers[0].sockets[0].getsockname()[1], loop)
    finally:
        for _, server, _ in running:
            server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
