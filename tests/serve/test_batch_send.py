"""Sends of many sockets in one call: all bytes in order, what is not taken is written, one by one without numba."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from kvfold.serve import batch_send
from kvfold.serve.batch_send import is_prepared, prepare, send_all


class Stream:
    """One end of a connection; keeps what is left to it."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.near.setblocking(False)
        self.fd = self.near.fileno()
        self.left = b""

    def write(self, data: bytes) -> None:
        self.left += data


@pytest.fixture
def streams() -> Iterator[list[Stream]]:
    found = [Stream() for _ in range(6)]
    yield found
    for stream in found:
        stream.near.close()
        stream.far.close()


def test_each_socket_gets_its_bytes(streams: list[Stream]) -> None:
    pytest.importorskip("numba")
    prepare()
    assert is_prepared()
    for number in range(2):
        send_all([(stream, b"%d of %d" % (number, i) * i) for i, stream in enumerate(streams)])
        got = [stream.far.recv(1000) if i else b"" for i, stream in enumerate(streams)]
        assert got == [b"%d of %d" % (number, i) * i for i in range(6)]
    assert not any(stream.left for stream in streams)


def test_what_a_socket_does_not_take_is_left_to_its_stream(streams: list[Stream]) -> None:
    pytest.importorskip("numba")
    prepare()
    streams[1].far.close()
    long = bytes(range(256)) * 40_000
    data = [b"a", b"gone", long, b"d", b"e", b"f"]
    send_all(list(zip(streams, data, strict=True)))
    assert [stream.left for stream in streams if stream is not streams[2]] == [b"", b"gone", b"", b"", b""]
    left = streams[2].left
    assert 0 < len(left) < len(long) and long.endswith(left)
    got = b""
    while len(got) < len(long) - len(left):
        got += streams[2].far.recv(1 << 20)
    assert got + left == long
    assert [streams[i].far.recv(10) for i in (0, 3, 4, 5)] == [b"a", b"d", b"e", b"f"]


def test_without_numba_streams_write(streams: list[Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_send, "_compiled", [])
    monkeypatch.setattr(batch_send, "HAS_NUMBA", False)
    prepare()
    assert not is_prepared()
    send_all([(stream, b"x") for stream in streams])
    assert [stream.left for stream in streams] == [b"x"] * 6
