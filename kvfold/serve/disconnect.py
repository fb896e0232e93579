"""Work for a client ends when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

T = TypeVar("T")
DISCONNECT = "kvfold.disconnect"  # in the scope: tells when the client has disconnected


class Disconnect:
    """Of one request; the connection calls `happen`. `listen`: has the connection read on, or it would not notice.

    ASGI's way, a task that asks for messages beside the one that works, costs more than all fields of a request."""

    def __init__(self, listen: Callable[[], None]) -> None:
        self._listen = listen
        self._has_happened = False
        self._task: asyncio.Task[Any] | None = None  # works for the client

    def happen(self) -> None:
        self._has_happened = True
        if self._task is not None:
            self._task.cancel()

    async def cancelling(self, work: Coroutine[Any, Any, T]) -> T:
        """As `cancel_on_disconnect`."""
        self._listen()
        if self._has_happened:
            work.close()
            raise ClientDisconnect
        task = self._task = asyncio.current_task()
        try:
            return await work
        except asyncio.CancelledError:
            if self._has_happened and task is not None and not task.uncancel():  # as asyncio.timeout tells whose it is
                raise ClientDisconnect from None
            raise
        finally:
            self._task = None


async def cancel_on_disconnect(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of the work; cancels it and raises ClientDisconnect if the client disconnects first."""
    known: Disconnect | None = scope.get(DISCONNECT)
    if known is not None:
        return await known.cancelling(work)
    task, disconnect = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for one in (task, disconnect):
            one.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
