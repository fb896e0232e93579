"""The processes of `kvfold serve --replicas N`: started, watched, started again when they die, and ended together.

    parent ── socketpair ── replica      one line of JSON when it takes requests; the end of the stream in either
                                         direction says that the other one is gone, also after a kill -9

A replica has a session of its own, so that Ctrl-C reaches the parent alone, which then ends all replicas in order.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvfold.errors import KvfoldError
from kvfold.serve.middleware import POLL_HEADER
from kvfold.serve.replicas.lifeline import VARIABLE
from kvfold.serve.replicas.routing import Backend
from kvfold.serve.replicas.upstream import Links, Silent, Unreachable, fetch

HEALTH_EVERY_S = 1.0
HEALTH_TIMEOUT_S = 10.0  # after which the requests of a replica go to another one
SILENT_S = 60.0  # without an answer of /health, after which a replica is killed
_SHORTEST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0  # before a replica that died is started again
_STEADY_S = 60.0  # after which a death is no sign of a replica that cannot run
_POLL = [(POLL_HEADER.encode(), b"1")]
_log = logging.getLogger("kvfold.serve")


class ReplicaFailed(KvfoldError):
    """A replica ended before it took its first request; its own message is on stderr."""

    def __init__(self, number: int, code: int) -> None:
        super().__init__(f"replica {number} ended before it took requests (exit code {code}); what it said is above")
        self.code = code


@dataclass(eq=False)
class Replica:
    """`pid` changes with each start; `body_bytes` is the replica's own limit."""

    backend: Backend
    process: asyncio.subprocess.Process | None = None
    pid: int = 0
    body_bytes: int = 0
    num_starts: int = 0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    polls: Links = field(default_factory=Links)  # of health checks, which use one connection

    def signal(self, number: int) -> None:
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


class Fleet:
    """Used from one event loop. `command` starts a server, which reads `Lifeline.of_environment`."""

    def __init__(self, command: Sequence[str], count: int) -> None:
        self._command = command
        self.replicas = [Replica(Backend(number)) for number in range(count)]
        self._folder = Path(tempfile.mkdtemp(prefix="kvfold-"))  # of mode 0700: nobody else can reach the sockets
        self._tasks: list[asyncio.Task[None]] = []
        self._is_ending = False

    @property
    def backends(self) -> list[Backend]:
        return [replica.backend for replica in self.replicas]

    @property
    def body_bytes(self) -> int:
        return max(replica.body_bytes for replica in self.replicas)

    async def start(self) -> None:
        """Returns when all take requests; the first goes ahead, so that a model is pulled, or an error told, once."""
        await self._start(self.replicas[:1])
        await self._start(self.replicas[1:])

    async def _start(self, replicas: Sequence[Replica]) -> None:
        tasks = [asyncio.create_task(self._keep(replica)) for replica in replicas]
        self._tasks += tasks
        waits = [asyncio.create_task(replica.ready.wait()) for replica in replicas]
        try:
            while not all(replica.ready.is_set() for replica in replicas):
                pending = [wait for wait in waits if not wait.done()]
                await asyncio.wait([*tasks, *pending], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for wait in waits:
                wait.cancel()

    async def _keep(self, replica: Replica) -> None:
        """Start it again whenever it has died; ReplicaFailed if it never took a request."""
        wait_s = _SHORTEST_WAIT_S
        while not self._is_ending:
            began = time.monotonic()
            code = await self._run(replica)
            if self._is_ending:
                return
            if not replica.ready.is_set():
                raise ReplicaFailed(replica.backend.number, code)
            wait_s = _SHORTEST_WAIT_S if time.monotonic() - began > _STEADY_S else min(2 * wait_s, _LONGEST_WAIT_S)
            facts = {"replica": str(replica.backend.number), "exit code": str(code)}
            _log.error("a replica ended and is started again", extra={"facts": facts})
            await asyncio.sleep(wait_s)

    async def _run(self, replica: Replica) -> int:
        """Its exit code, once it has ended."""
        backend = replica.backend
        backend.socket = str(self._folder / f"{backend.number}-{replica.num_starts}")
        replica.num_starts += 1
        ours, theirs = socket.socketpair()
        plan = {
            "socket": backend.socket,
            "lifeline": theirs.fileno(),
            "number": backend.number,
            "of": len(self.replicas),
        }
        try:
            replica.process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, VARIABLE: json.dumps(plan)},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        replica.pid = replica.process.pid
        reader, writer = await asyncio.open_connection(sock=ours)
        watch = asyncio.create_task(self._watch(replica, reader))
        try:
            return await replica.process.wait()
        finally:
            backend.is_up = False
            watch.cancel()
            writer.close()
            with suppress(OSError):
                Path(backend.socket).unlink()

    async def _watch(self, replica: Replica, reader: asyncio.StreamReader) -> None:
        """Requests go to it from its first line on, except while /health does not answer with 200."""
        line = await reader.readline()
        if not line:
            return
        replica.body_bytes = json.loads(line)["body_bytes"]
        backend = replica.backend
        backend.is_up = True
        replica.ready.set()
        heard = time.monotonic()
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            try:
                status, _, _ = await fetch(
                    backend.socket, "GET", b"/health", _POLL, b"", HEALTH_TIMEOUT_S, replica.polls
                )
                heard, backend.is_up = time.monotonic(), status == 200
            except Unreachable as error:
                if isinstance(error, Silent):
                    backend.give_up()
                backend.is_up = False
                if time.monotonic() - heard > SILENT_S:
                    facts = {"replica": str(backend.number)}
                    _log.error("a replica does not answer and is killed", extra={"facts": facts})
                    replica.signal(signal.SIGKILL)

    def end(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to all; none is started again. SIGTERM is sent once, since a second one kills."""
        if self._is_ending and number == signal.SIGTERM:
            return
        self._is_ending = True
        for replica in self.replicas:
            replica.signal(number)

    async def wait(self, seconds: float) -> int:
        """0 if all have ended by themselves with 0, else 1; those that are left after so many seconds are killed."""
        processes = [replica.process for replica in self.replicas if replica.process is not None]
        waits = [asyncio.create_task(process.wait()) for process in processes]
        if waits:
            await asyncio.wait(waits, timeout=seconds)
        self.end(signal.SIGKILL)
        codes = await asyncio.gather(*waits)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)
        return int(any(codes))


def replica_command(words: Sequence[str]) -> list[str]:
    """Of `kvfold serve` with the same words; what it finds in its environment makes it a replica."""
    return [sys.executable, "-m", "kvfold", *words]
