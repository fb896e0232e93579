"""Request preprocessing in worker threads, outside the event loop: decode JSON, validate, render, tokenize.

Tenants are served round-robin; large bodies have threads of their own, so small ones do not queue behind them; queue
length is bounded. Work of a disconnected client is dropped from the queue. Where no thread would have to be waited for,
quick work on a short body is done in the event loop: to wake a thread takes longer, and both would wait for the
interpreter's lock behind the scheduler's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from kvfold.engine.scheduling.queues import FairQueue
from kvfold.plurals import counted
from kvfold.serve.api.errors import ApiError
from kvfold.serve.settings import Limits

SMALL_BYTES = 64 << 10  # about 8,192 tokens of plain text
_TINY_BYTES = 1 << 10
_THREADS = 2  # of each pool
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class _Waiter:
    tenant: str
    granted: asyncio.Future[None]


class _WorkerPool:
    """_THREADS threads and a queue that is fair between tenants."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix=f"kvfold-preprocess-{name}")
        self._num_free = _THREADS
        self._queue: FairQueue[_Waiter] = FairQueue()

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    async def run(self, tenant: str, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        await self._acquire(tenant)
        begun = self._pool.submit(work)
        begun.add_done_callback(lambda done: self._release(loop, done))  # when the thread is free, not on cancellation
        return await asyncio.wrap_future(begun)

    @property
    def is_free(self) -> bool:
        """Whether work would begin at once."""
        return bool(self._num_free) and not self._queue

    async def _acquire(self, tenant: str) -> None:
        if self.is_free:
            self._num_free -= 1
            return
        mine = _Waiter(tenant, asyncio.get_running_loop().create_future())
        self._queue.push(mine)
        try:
            await mine.granted
        except asyncio.CancelledError:
            if not self._queue.remove_if(lambda one: one is mine):
                self._next()  # it had been granted a thread
            raise

    def _release(self, loop: asyncio.AbstractEventLoop, done: Future[T]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._next)

    def _next(self) -> None:
        if self._queue:
            first = self._queue.pop_first()
            if not first.granted.done():
                first.granted.set_result(None)
        else:
            self._num_free += 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class Preprocessor:
    """Used from one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._small, self._large = _WorkerPool("small"), _WorkerPool("large")
        self._active: Counter[str] = Counter()

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T], *, is_quick: bool = False) -> T:
        """Result of work on a body of `num_bytes`; ApiError 429 or 529 if too many requests are active or queued,
        TimeoutError if it takes longer than a request may. `is_quick`: it takes less than a millisecond or so where the
        body is short."""
        self._check(tenant)
        pool = self._small if num_bytes <= SMALL_BYTES else self._large
        if is_quick and 0 < num_bytes <= _TINY_BYTES and pool.is_free:
            return work()
        self._active[tenant] += 1
        try:
            async with asyncio.timeout(self._limits.request_s):
                return await pool.run(tenant, work)
        finally:
            self._active[tenant] -= 1
            if not self._active[tenant]:
                del self._active[tenant]

    def _check(self, tenant: str) -> None:
        most, num_waiting = self._limits.per_tenant, self._small.num_waiting + self._large.num_waiting
        if most is not None and self._active[tenant] >= most:
            message = f"this tenant has {counted(most, 'request')} being read (--max-per-tenant); wait for one"
            raise ApiError(429, message, retry_after_s=1)
        if num_waiting >= self._limits.running + self._limits.waiting:
            message = f"the queue has {counted(num_waiting, 'request')} to read; try again later"
            raise ApiError(529, message, retry_after_s=1)

    def close(self) -> None:
        """Drop queued work."""
        self._small.close()
        self._large.close()
