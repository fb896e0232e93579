"""What a job tells, on its way from the scheduler's thread into the server's loop, and the place that it takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvfold.engine.jobs import Ended, Event


class Inbox:
    """Events of one job. `leave` is called once, in the loop, when the job has ended or its time is over: whether or
    not anybody reads the events, and whatever the scheduler's thread is busy with."""

    def __init__(self, timeout_s: float, leave: Callable[[], None]) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._leave = leave
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout_s, self._add, Ended("late"))

    def tell(self, event: Event) -> None:
        """From any thread; a loop that is closed has nobody who would hear."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._add, event)

    def close(self) -> None:
        """There will be no job."""
        self._add(Ended("cancelled"))

    async def get(self) -> Event:
        return await self._events.get()

    def _add(self, event: Event) -> None:
        if self._has_ended:
            return  # the time was over before the scheduler said so
        self._events.put_nowait(event)
        if isinstance(event, Ended):
            self._has_ended = True
            self._timer.cancel()
            self._leave()
