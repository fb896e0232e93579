"""Work for a client that has disconnected is cancelled, and cancellation by others stays what it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from kvfold.serve.disconnect import DISCONNECT, Disconnect, cancel_on_disconnect


async def _never() -> Any:
    raise AssertionError("the connection tells of the end, so nobody asks for messages")


def _ended(act: Callable[[Disconnect, asyncio.Task[Any]], object]) -> tuple[list[str], BaseException | None]:
    """What the work went through, and how its task ended, if this is done while it waits."""
    seen: list[str] = []

    async def work() -> None:
        seen.append("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def run() -> BaseException | None:
        known = Disconnect(lambda: seen.append("listens"))
        task = asyncio.create_task(cancel_on_disconnect({DISCONNECT: known}, _never, work()))
        await asyncio.sleep(0)
        act(known, task)
        (found,) = await asyncio.gather(task, return_exceptions=True)
        return found

    return seen, asyncio.run(run())


def test_a_disconnect_cancels_the_work() -> None:
    seen, found = _ended(lambda known, task: known.happen())
    assert (seen, type(found)) == (["listens", "begun", "cancelled"], ClientDisconnect)


def test_other_cancellations_are_not_taken_for_a_disconnect() -> None:
    seen, found = _ended(lambda known, task: task.cancel())
    assert (seen, type(found)) == (["listens", "begun", "cancelled"], asyncio.CancelledError)


def test_both_at_once_are_a_cancellation() -> None:
    def both(known: Disconnect, task: asyncio.Task[Any]) -> None:
        task.cancel()
        known.happen()

    _, found = _ended(both)
    assert type(found) is asyncio.CancelledError


@pytest.mark.parametrize("late", [False, True])
def test_work_begins_only_for_a_client_that_is_there(late: bool) -> None:
    begun: list[int] = []

    async def work() -> int:
        begun.append(1)
        return 7

    async def run() -> None:
        known = Disconnect(lambda: None)
        asked: Callable[[], Awaitable[int]] = lambda: cancel_on_disconnect({DISCONNECT: known}, _never, work())  # noqa: E731
        if late:
            assert await asked() == 7
        known.happen()  # of nobody, once the work is done
        await asyncio.sleep(0)
        with pytest.raises(ClientDisconnect):
            await asked()

    asyncio.run(run())
    assert len(begun) == late
