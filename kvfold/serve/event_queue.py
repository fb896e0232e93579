"""Events of jobs on their way from the scheduler's thread to the event loop: one wake-up of the loop for each step.

A step gives every running reply a token. Both threads share the interpreter's lock, and each wake-up, each task that
goes on and each send hands it over. So the events of all jobs lie in one mailbox, which the scheduler flushes when all
of a step are there, and the loop takes them in one call. It puts no texts while the mailbox takes none:

    scheduler   | step | put put put | flush | step | put put put | flush |
    event loop                               | lines of all streams | sends |

Where a stream has nothing but texts before it, and its client has read what was sent, its lines go straight to the
socket; the tasks of its request sleep until another event comes. Otherwise its events are queued for them. Texts of
many replies wait for a few milliseconds, so that the scheduler has the interpreter for most of the time. A reply gets
the texts of several steps as one.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event as ThreadEvent
from threading import get_ident
from typing import Protocol

from kvfold.engine.scheduling.jobs import Ended, Event, TextDelta
from kvfold.serve.batch_send import Stream, is_prepared, send_all

# Seconds between two deliveries of texts, for each that is delivered: about ten times the lines of one, and four times
# what a queued one takes with all hand-overs of the lock.
_SENT_S, _QUEUED_S = 40e-6, 160e-6

_TURNS = 2  # of the loop, from bytes to a job

Line = Callable[[str], str | None]  # of a text in a stream; None: it takes more than a line


class ChunkStream(Stream, Protocol):
    """A chunked body that is being written. `is_clear`: all that was written is sent, and more can be."""

    @property
    def is_clear(self) -> bool: ...
    def chunk(self, data: bytes) -> bytes: ...


Batch = dict["EventQueue", list[Event]]


class Mailbox:
    """Events of all jobs of one event loop; made in its thread. One other thread puts and flushes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self.loop, self._clock = loop, clock
        self._thread = get_ident()
        self._events: Batch = {}  # touched by the other thread alone, as `_urgent`
        self._urgent: dict[EventQueue, None] = {}  # have events other than texts
        self._is_behind = False  # texts of all queues are on their way to the loop
        self._next = 0.0  # when texts are delivered next

    def put(self, queue: EventQueue, event: Event) -> None:
        """From another thread: it is delivered after one of the next calls of `flush`. From the loop's own: at once."""
        if get_ident() == self._thread:
            queue.add(event)
            return
        events = self._events.get(queue)
        if events is None:
            self._events[queue] = [event]
        else:
            events.append(event)
        if type(event) is not TextDelta:
            self._urgent[queue] = None

    @property
    def takes_texts(self) -> bool:
        """Whether the next flush delivers texts; those that are put before wait for it."""
        return not self._is_behind and self._clock() >= self._next

    def flush(self) -> None:
        """After each step: texts may wait for one of the next, other events and the texts before them do not."""
        if not self._events:
            return
        if self.takes_texts:
            self._is_behind = True
            events, self._events = self._events, {}
            self._call(self._deliver_all, events)
        elif self._urgent:
            self._call(self._deliver, {queue: self._events.pop(queue) for queue in self._urgent})
        self._urgent.clear()

    def settle(self, timeout_s: float) -> None:
        """Wait, at most so long, until the loop has taken what has arrived so far: until it has gone round twice, once
        for bytes, and once for what is done with them."""
        has_settled = ThreadEvent()

        def turn(rest: int) -> None:
            if rest:
                self.loop.call_soon(turn, rest - 1)
            else:
                has_settled.set()

        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(turn, _TURNS)
            has_settled.wait(timeout_s)

    def _call(self, deliver: Callable[[Batch], object], batch: Batch) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(deliver, batch)

    def _deliver_all(self, batch: Batch) -> None:
        try:
            num_sent = self._deliver(batch)
            self._next = self._clock() + _SENT_S * num_sent + _QUEUED_S * (len(batch) - num_sent)
        finally:
            self._is_behind = False

    def _deliver(self, batch: Batch) -> int:
        """Returns how many of the queues cost no more than a line."""
        writes: list[tuple[Stream, bytes]] = []
        for queue, events in batch.items():
            write = queue.line_of(events)
            if write is None:
                for event in events:
                    queue.add(event)
            else:
                writes.append(write)
        send_all(writes)
        return len(writes) if is_prepared() else 0


class EventQueue:
    """Events of one job, with the job's time-out.

    `on_end` is called once, in the event loop, when the job has ended or timed out, whether or not the events are
    read and whatever the scheduler's thread is doing. `stream` and `line`: where and how texts may be written while the
    reader waits for the next event; None while it must read them."""

    def __init__(self, mailbox: Mailbox, timeout_s: float, on_end: Callable[[], None]) -> None:
        self.stream: ChunkStream | None = None
        self.line: Line | None = None
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

    def line_of(self, events: Sequence[Event]) -> tuple[ChunkStream, bytes] | None:
        """The bytes that these events are, if nothing but texts stands between them and the client."""
        stream, reader = self.stream, self._reader
        if stream is None or self.line is None or reader is None or reader.done() or self._events:
            return None
        texts = [event.text for event in events if type(event) is TextDelta]
        if len(texts) < len(events) or not stream.is_clear:
            return None
        try:
            line = self.line("".join(texts))
            return None if line is None else (stream, stream.chunk(line.encode()))
        except Exception:  # it is raised again where the request reads the text
            return None

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
