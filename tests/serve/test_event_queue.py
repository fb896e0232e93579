"""Events from the scheduler's thread: one wake-up of the loop for a step, texts in order and joined, one end."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import count
from socket import socketpair
from threading import Thread
from typing import Any

import pytest

from kvfold.engine.scheduling.jobs import Ended, Event, PrefillDone, TextDelta
from kvfold.serve.event_queue import EventQueue, Mailbox


class Watched(asyncio.SelectorEventLoop):
    """Counts its wake-ups from other threads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_woken = 0

    def call_soon_threadsafe(self, callback: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        self.num_woken += 1
        return super().call_soon_threadsafe(callback, *args, **options)


def told(*steps: list[tuple[int, Event]], num_queues: int = 1) -> list[list[Event]]:
    """What readers of the queues get of events that another thread puts, flushed after every step."""

    async def run() -> list[list[Event]]:
        mailbox = Mailbox(asyncio.get_running_loop())
        queues = [EventQueue(mailbox, 60.0, lambda: None) for _ in range(num_queues)]

        def put() -> None:
            for step in steps:
                for number, event in step:
                    queues[number].put(event)
                mailbox.flush()

        thread = Thread(target=put)
        thread.start()
        thread.join()  # the loop is behind: it sees nothing before all is there
        return await asyncio.gather(*(_until_end(queue) for queue in queues))

    return asyncio.run(run())


async def _until_end(queue: EventQueue) -> list[Event]:
    found = [await queue.get()]
    while not isinstance(found[-1], Ended):
        found.append(await queue.get())
    return found


def test_texts_that_were_not_read_are_joined() -> None:
    (found,) = told(
        [(0, PrefillDone(3))], [(0, TextDelta("a"))], [(0, TextDelta("b"))], [(0, TextDelta("c")), (0, Ended("eos", 3))]
    )
    assert found == [PrefillDone(3), TextDelta("abc"), Ended("eos", 3)]


def test_a_step_of_many_replies_wakes_the_loop_once() -> None:
    loop = Watched()

    async def run() -> int:
        mailbox = Mailbox(loop, clock=partial(next, count()))
        queues = [EventQueue(mailbox, 60.0, lambda: None) for _ in range(50)]
        for step in range(3):
            _put_all(mailbox, queues, TextDelta(str(step)))
            assert [await queue.get() for queue in queues] == [TextDelta(str(step))] * 50
        mailbox.flush()  # of nothing
        for queue in queues:
            queue.close()
        return loop.num_woken

    try:
        assert loop.run_until_complete(run()) == 3
    finally:
        loop.close()


def test_texts_of_many_replies_wait_for_the_next_flush_and_ends_do_not() -> None:
    async def run() -> list[list[Event]]:
        mailbox = Mailbox(asyncio.get_running_loop(), clock=lambda: 1.0)  # no time passes
        queues = [EventQueue(mailbox, 60.0, lambda: None) for _ in range(2)]
        found = []
        for event in (TextDelta("a"), TextDelta("b"), TextDelta("c"), Ended("eos", 3)):
            _put_all(mailbox, queues, event)
            await asyncio.sleep(0.01)
            found.append([*queues[0]._events])
        return found

    first, held, *_, last = asyncio.run(run())
    assert first == held == [TextDelta("a")]
    assert last == [TextDelta("abc"), Ended("eos", 3)]


def _put_all(mailbox: Mailbox, queues: list[EventQueue], event: Event) -> None:
    """From another thread, before the loop goes on."""

    def put() -> None:
        for queue in queues:
            queue.put(event)
        mailbox.flush()

    thread = Thread(target=put)
    thread.start()
    thread.join()


def test_an_end_does_not_take_texts_of_other_replies_along() -> None:
    async def run() -> list[list[Event]]:
        mailbox = Mailbox(asyncio.get_running_loop(), clock=lambda: 1.0)
        queues = [EventQueue(mailbox, 60.0, lambda: None) for _ in range(2)]
        _put_all(mailbox, queues, TextDelta("a"))
        await asyncio.sleep(0.01)
        _put_all(mailbox, queues, TextDelta("b"))
        _put_all(mailbox, queues[:1], Ended("eos", 2))
        await asyncio.sleep(0.01)
        found = [[*queue._events] for queue in queues]
        _put_all(mailbox, queues[1:], Ended("eos", 2))
        await asyncio.sleep(0.01)
        return [*found, [*queues[1]._events]]

    ended, running, later = asyncio.run(run())
    assert ended == [TextDelta("ab"), Ended("eos", 2)]
    assert running == [TextDelta("a")]
    assert later == [TextDelta("ab"), Ended("eos", 2)]


class Sent:
    """A stream that keeps what is written."""

    fd = -1

    def __init__(self, is_clear: bool = True) -> None:
        self.is_clear = is_clear
        self.data = b""

    def chunk(self, data: bytes) -> bytes:
        return b"[" + data + b"]"

    def write(self, data: bytes) -> None:
        self.data += data


def _line(text: str) -> str | None:
    if "!" in text:
        raise ValueError
    return None if "<" in text else f"{text}\n"


@pytest.mark.parametrize(
    ("texts", "is_clear", "written", "read"),
    [
        ("ab", True, b"[a\n][b\n]", ""),
        ("ab", False, b"", "ab"),  # the client has not read what was sent
        ("a<b", True, b"[a\n][b\n]", "<"),  # more than a line
        ("a!b", True, b"[a\n][b\n]", "!"),
    ],
)
def test_texts_go_to_the_stream_while_their_reader_waits(texts: str, is_clear: bool, written: bytes, read: str) -> None:
    async def run() -> tuple[bytes, list[Event]]:
        mailbox = Mailbox(asyncio.get_running_loop(), clock=partial(next, count()))
        queue, stream = EventQueue(mailbox, 60.0, lambda: None), Sent(is_clear)
        reader = asyncio.create_task(_until_end(queue))
        await asyncio.sleep(0)
        queue.stream, queue.line = stream, _line
        for text in texts:
            _put_all(mailbox, [queue], TextDelta(text))
            await _next_callback(mailbox)
        _put_all(mailbox, [queue], Ended("eos", len(texts)))
        return stream.data, await reader

    data, (*found, _) = asyncio.run(run())
    assert (data, "".join(event.text for event in found if isinstance(event, TextDelta))) == (written, read)


async def _next_callback(mailbox: Mailbox) -> None:
    """Until the loop has delivered."""
    done = mailbox.loop.create_future()
    mailbox.loop.call_soon(done.set_result, None)
    await done


def test_a_text_behind_an_event_that_is_not_read_waits_for_it() -> None:
    async def run() -> tuple[bytes, list[Event]]:
        mailbox = Mailbox(asyncio.get_running_loop(), clock=partial(next, count()))
        queue, stream = EventQueue(mailbox, 60.0, lambda: None), Sent()
        queue.stream, queue.line = stream, _line
        for event in (PrefillDone(1), TextDelta("a"), TextDelta("b"), Ended("eos", 2)):
            _put_all(mailbox, [queue], event)
            await _next_callback(mailbox)
        found = await _until_end(queue)
        return stream.data, found

    assert asyncio.run(run()) == (b"", [PrefillDone(1), TextDelta("ab"), Ended("eos", 2)])


def test_a_text_does_not_overtake_one_whose_reader_is_only_woken() -> None:
    async def run() -> bool:
        queue = EventQueue(Mailbox(asyncio.get_running_loop()), 60.0, lambda: None)
        queue.stream, queue.line = Sent(), _line
        reader = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add(TextDelta("<"))
        is_written = queue.line_of([TextDelta("b")]) is not None
        assert await reader == TextDelta("<")
        queue.close()
        return is_written

    assert not asyncio.run(run())


def test_an_event_of_the_loop_itself_needs_no_flush() -> None:
    async def run() -> Event:
        queue = EventQueue(Mailbox(asyncio.get_running_loop()), 60.0, lambda: None)
        queue.put(PrefillDone(1))
        try:
            return await asyncio.wait_for(queue.get(), 5)
        finally:
            queue.close()

    assert asyncio.run(run()) == PrefillDone(1)


def test_replies_get_their_own_events() -> None:
    found = told(
        [(0, TextDelta("a")), (1, TextDelta("x"))], [(1, Ended("length", 1)), (0, Ended("eos", 1))], num_queues=2
    )
    assert found == [[TextDelta("a"), Ended("eos", 1)], [TextDelta("x"), Ended("length", 1)]]


@pytest.mark.parametrize("late", [Ended("eos", 9), TextDelta("late")])
def test_nothing_follows_the_end(late: Event) -> None:
    async def run() -> tuple[list[Event], int]:
        mailbox, ends = Mailbox(asyncio.get_running_loop()), []
        queue = EventQueue(mailbox, 0.0, lambda: ends.append(1))
        found = [await queue.get()]
        queue.put(late)
        mailbox.flush()
        await asyncio.sleep(0.01)
        assert not queue._events
        return found, len(ends)

    assert asyncio.run(run()) == ([Ended("late")], 1)


def test_settled_is_when_what_had_arrived_is_dealt_with() -> None:
    done: list[str] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()
        mailbox, (client, server) = Mailbox(loop), socketpair()

        def read() -> None:
            server.recv(1)
            loop.call_soon(done.append, "taken")  # as the task of a request

        def settle() -> None:
            client.send(b"x")
            mailbox.settle(60.0)
            done.append("settled")

        with client, server:
            loop.add_reader(server, read)
            await asyncio.to_thread(settle)
            loop.remove_reader(server)

    asyncio.run(run())
    assert done == ["taken", "settled"]


def test_a_loop_that_is_stuck_or_over_is_not_waited_for() -> None:
    async def run() -> Mailbox:
        mailbox = Mailbox(asyncio.get_running_loop())
        thread = Thread(target=mailbox.settle, args=(0.05,))
        thread.start()
        thread.join(60.0)  # the loop stands still meanwhile
        assert not thread.is_alive()
        return mailbox

    asyncio.run(run()).settle(60.0)
