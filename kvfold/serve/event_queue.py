"""Events of jobs on their way from the scheduler's thread to the event loop: one wake-up of the loop for each step.

A step gives every running reply a token. Waking the loop for each would make both threads take turns at the
interpreter's lock hundreds of times a step. So events are put into one mailbox, which the scheduler flushes when all of
a step are there. Texts of many replies wait for a few milliseconds, so that writing them leaves the interpreter to the
scheduler for most of the time. A reply finds the texts of several steps as one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident

from kvfold.engine.scheduling.jobs import Ended, Event, TextDelta

_TEXT_S = 40e-6  # between two deliveries of texts, for each that is delivered: two to four times what writing it takes


class Mailbox:
    """Events of all jobs of one event loop; made in its thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self.loop, self._clock = loop, clock
        self._thread = get_ident()
        self._events: deque[tuple[EventQueue, Event]] = deque()
        self._is_woken = False
        self._is_urgent = False  # events other than texts are there
        self._next = 0.0  # when texts are delivered next

    def put(self, queue: EventQueue, event: Event) -> None:
        """From another thread: it is delivered after the next `flush`. From the loop's own: at once."""
        if get_ident() == self._thread:
            queue.add(event)
        else:
            self._events.append((queue, event))
            self._is_urgent = self._is_urgent or not isinstance(event, TextDelta)

    def flush(self) -> None:
        """From the scheduler's thread, after each step: texts may wait for one of the next."""
        if not self._events or self._is_woken:
            return
        now = self._clock()
        if self._is_urgent or now >= self._next:
            self._is_woken, self._is_urgent = True, False
            self._next = now + _TEXT_S * len(self._events)
            with suppress(RuntimeError):  # the loop is closed
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_woken = False  # before the events are taken: a flush from now on wakes the loop again
        while self._events:
            queue, event = self._events.popleft()
            queue.add(event)


class EventQueue:
    """Events of one job, with the job's time-out.

    `on_end` is called once, in the event loop, when the job has ended or timed out, whether or not the events are
    read and whatever the scheduler's thread is doing."""

    def __init__(self, mailbox: Mailbox, timeout_s: float, on_end: Callable[[], None]) -> None:
        self._mailbox = mailbox
        self._events: deque[Event] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._on_end = on_end
        self._has_ended = False
        self._timer = mailbox.loop.call_later(timeout_s, self.add, Ended("late"))

    def put(self, event: Event) -> None:
        """From any thread; another one than the loop's flushes the mailbox afterwards."""
        self._mailbox.put(self, event)

    @property
    def is_unread(self) -> bool:
        return bool(self._events)

    def close(self) -> None:
        """The job was not submitted."""
        self.add(Ended("cancelled"))

    async def get(self) -> Event:
        """The next event; texts that have come since the last one are joined. For one reader."""
        while not self._events:
            self._reader = self._mailbox.loop.create_future()
            await self._reader
        return self._events.popleft()

    def add(self, event: Event) -> None:
        """In the event loop."""
        if self._has_ended:
            return  # it timed out before the scheduler reported it
        last = self._events[-1] if self._events else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            self._events[-1] = TextDelta(last.text + event.text)
        else:
            self._events.append(event)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
        if isinstance(event, Ended):
            self._has_ended = True
            self._timer.cancel()
            self._on_end()
