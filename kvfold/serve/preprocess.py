"""Work on a request before the scheduler has it: decode its JSON, check it, render the template, tokenize.

That runs in a few threads of its own, never in the event loop. Tenants take turns; large bodies have threads of their
own, so that small ones do not wait for them; how many wait is bounded. What a client who has gone was waiting for is
never begun.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvfold.engine.fair_queue import FairQueue
from kvfold.serve.api.errors import ApiError
from kvfold.serve.settings import Limits

SMALL_BYTES = 64 << 10  # about the most that 8,192 tokens of plain text take
_THREADS = 2  # of each kind
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Waiting:
    tenant: str
    turn: asyncio.Future[None]


class _Lane:
    """So many pieces of work at a time, tenants in turns."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"kvfold-intake-{name}")
        self._num_free = _THREADS
        self._queue: FairQueue[_Waiting] = FairQueue()

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        await self._turn(tenant)
        begun = self._pool.submit(work)
        begun.add_done_callback(lambda done: self._ended(loop, done))  # not when the client goes: the thread works on
        return await asyncio.wrap_future(begun)

    async def _turn(self, tenant: str) -> None:
        if self._num_free and not self._queue:
            self._num_free -= 1
            return
        mine = _Waiting(tenant, asyncio.get_running_loop().create_future())
        self._queue.push(mine)
        try:
            await mine.turn
        except asyncio.CancelledError:
            if not self._queue.remove_if(lambda one: one is mine):
                self._next()  # its turn had come
            raise

    def _ended(self, loop: asyncio.AbstractEventLoop, done: Future[T]) -> None:
        with suppress(RuntimeError):  # a loop that is closed has nobody who waits
            loop.call_soon_threadsafe(self._next)

    def _next(self) -> None:
        if self._queue:
            first = self._queue.pop_first()
            if not first.turn.done():
                first.turn.set_result(None)
        else:
            self._num_free += 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Intake:
    """Used from one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._small, self._large = _Lane("small"), _Lane("large")
        self._inside: Counter[str] = Counter()

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """What the work on a body of so many bytes returns; ApiError if too many wait for theirs."""
        self._check(tenant)
        self._inside[tenant] += 1
        try:
            lane = self._small if num_bytes <= SMALL_BYTES else self._large
            return await lane.run(tenant, work)
        finally:
            self._inside[tenant] -= 1
            if not self._inside[tenant]:
                del self._inside[tenant]

    def _check(self, tenant: str) -> None:
        most, num_waiting = self._limits.per_tenant, self._small.num_waiting + self._large.num_waiting
        if most is not None and self._inside[tenant] >= most:
            raise ApiError(429, f"{most} requests of yours are being read already; wait for one", retry_after_s=1)
        if num_waiting >= self._limits.waiting:
            raise ApiError(529, f"{num_waiting} requests wait to be read; try again later", retry_after_s=1)

    def close(self) -> None:
        """Nothing that waits is begun any more."""
        self._small.close()
        self._large.close()
