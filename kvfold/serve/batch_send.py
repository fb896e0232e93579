"""Sends of many sockets in one call that holds the interpreter's lock for none of them.

Each send of Python's own releases the lock and takes it again. Beside the scheduler's thread, which waits for the lock
after every operator of PyTorch, a step of 256 streams would so change hands hundreds of times. Numba compiles a loop
over the system's `send` instead, once for each process (`prepare`), and keeps the result on disk.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kvfold.core import HAS_NUMBA

_FEWEST = 4  # sockets; fewer are written one by one, as all are where nothing is compiled
_FLAGS = getattr(socket, "MSG_NOSIGNAL", 0)
_compiled: list[Callable[..., Any]] = []  # one at most


class Stream(Protocol):
    """A connection that is written to. `fd`: of its socket, which does not block; `write` never does either."""

    fd: int

    def write(self, data: bytes) -> None: ...


def prepare() -> None:
    """Compile, where numba is installed; for a second if it is not on disk."""
    if HAS_NUMBA and not _compiled:
        _compiled.append(_compile())


def is_prepared() -> bool:
    return bool(_compiled)


def send_all(writes: Sequence[tuple[Stream, bytes]]) -> None:
    """Send to each stream its bytes; nothing else may wait to be sent there. What a socket does not take at once, or
    refuses, is left to `write`."""
    if not _compiled or len(writes) < _FEWEST:
        for stream, data in writes:
            stream.write(data)
        return
    whole = np.frombuffer(b"".join([data for _, data in writes]), np.uint8)
    lens = np.array([len(data) for _, data in writes])
    sent = np.empty_like(lens)
    _compiled[0](np.array([stream.fd for stream, _ in writes]), whole.ctypes.data, lens, _FLAGS, sent)
    for i in np.flatnonzero(sent != lens).tolist():
        stream, data = writes[i]
        stream.write(data[max(int(sent[i]), 0) :])


def _compile() -> Callable[..., Any]:
    from numba import njit, types

    send = types.ExternalFunction("send", types.intp(types.intc, types.uintp, types.uintp, types.intc))

    def send_each(fds: Any, address: Any, lens: Any, flags: Any, sent: Any) -> None:
        begin = address
        for i in range(len(fds)):
            sent[i] = send(fds[i], begin, lens[i], flags)
            begin += lens[i]

    signature = "void(int64[::1], int64, int64[::1], int64, int64[::1])"
    options = {"nogil": True}
    try:
        found: Callable[..., Any] = njit(signature, cache=True, **options)(send_each)
    except RuntimeError:  # numba finds no folder
        found = njit(signature, **options)(send_each)
    return found
