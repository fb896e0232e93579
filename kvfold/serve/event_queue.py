"""Events of one job, from the scheduler's thread to the event loop, with the job's time-out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from kvfold.engine.scheduling.jobs import Ended, Event


class EventQueue:
    """`on_end` is called once, in the event loop, when the job has ended or timed out, whether or not the events are
    read and whatever the scheduler's thread is doing."""

    def __init__(self, timeout_s: float, on_end: Callable[[], None]) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._on_end = on_end
        self._has_ended = False
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(timeout_s, self._add, Ended("late"))

    def put(self, event: Event) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._add, event)

    def close(self) -> None:
        """The job was not submitted."""
        self._add(Ended("cancelled"))

    async def get(self) -> Event:
        return await self._events.get()

    def _add(self, event: Event) -> None:
        if self._has_ended:
            return  # it timed out before the scheduler reported it
        self._events.put_nowait(event)
        if isinstance(event, Ended):
            self._has_ended = True
            self._timer.cancel()
            self._on_end()
