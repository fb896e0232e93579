"""A ZeroMQ publisher of KV events, which subscribers of vLLM's publisher can read.

    PUB     topic, sequence number (8 bytes, big endian), msgpack of an EventBatch
    ROUTER  asked for a sequence number: all batches from there on that are remembered, then -1

`publish` never waits. A subscriber that reads too slowly misses batches, sees the gap in the numbers, and can ask for
what it missed. All sockets belong to one thread.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock, Thread

import msgspec
import zmq

from kvfold.errors import InputError
from kvfold.store.kv_events.blocks import Change
from kvfold.store.kv_events.messages import EventBatch

MAX_QUEUED = 100_000  # events that the thread has not taken yet
BUFFER = 10_000  # batches for replay, and for a subscriber that does not read
MAX_BATCH = 256  # events
_END = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 200
_FRAMES, _SEQUENCE_BYTES = 3, 8  # of a replay request


class KvEventPublisher:
    """Binds at once; `rank` is this process's number among replicas. InputError if an address cannot be bound."""

    def __init__(
        self, endpoint: str, replay_endpoint: str | None = None, *, topic: str = "", rank: int = 0, buffer: int = BUFFER
    ) -> None:
        self.num_published = self.num_dropped = 0  # events; dropped where the queue, or that of a subscriber, was full
        self._topic, self._rank = topic.encode(), rank
        self._lock = Lock()
        self._events: deque[Change] = deque()
        self._gaps = 0  # sequence numbers to leave out, for events that were dropped
        self._is_closed = False
        self._sequence = 0
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=buffer)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        try:
            self._pub = self._bind(zmq.PUB, endpoint, buffer)
            self._router = None if replay_endpoint is None else self._bind(zmq.ROUTER, replay_endpoint, buffer + 1)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._pub.setsockopt(zmq.XPUB_NODROP, 1)
        self.endpoints = [one.getsockopt_string(zmq.LAST_ENDPOINT) for one in (self._pub, self._router) if one]
        self._thread = Thread(target=self._run, name="kvfold-kv-events", daemon=True)
        self._thread.start()

    def _bind(self, kind: int, endpoint: str, most: int) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set_hwm(most)
        made.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            raise InputError(f"KV events cannot be published at {endpoint} ({error}); choose another address") from None
        return made

    def publish(self, event: Change) -> None:
        """Thread-safe; an event that finds the queue full is dropped and leaves a gap in the numbers."""
        with self._lock:
            if len(self._events) >= MAX_QUEUED:
                self.num_dropped += 1
                self._gaps = 1
                return
            self._events.append(event)
            if len(self._events) > 1:
                return
        self._wake()

    def close(self) -> None:
        """Send what is queued, and unbind."""
        self._is_closed = True
        self._wake()
        self._thread.join()
        self._context.destroy(linger=_LINGER_MS)
        self._waking.close()
        self._woken.close()

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it has been woken often enough
            self._waking.send(b"\0")

    # In the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._woken.fileno() in ready:
                self._woken.recv(4096)
            while events := self._take():
                self._send(events)
            if self._is_closed:
                return
            if self._router is not None and self._router in ready:
                self._replay(self._router)

    def _take(self) -> list[Change]:
        with self._lock:
            self._sequence, self._gaps = self._sequence + self._gaps, 0
            return [self._events.popleft() for _ in range(min(len(self._events), MAX_BATCH))]

    def _send(self, events: Sequence[Change]) -> None:
        payload = self._encoder.encode(EventBatch(time.time(), list(events), self._rank))
        number = self._sequence.to_bytes(_SEQUENCE_BYTES, "big")
        self._sequence += 1
        self._sent.append((number, payload))
        self.num_published += len(events)
        frames = (self._topic, number, payload)
        try:
            self._pub.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:  # some subscriber's queue is full: the others get it
            self.num_dropped += len(events)
            self._pub.setsockopt(zmq.XPUB_NODROP, 0)
            self._pub.send_multipart(frames, zmq.DONTWAIT)
            self._pub.setsockopt(zmq.XPUB_NODROP, 1)

    def _replay(self, router: zmq.Socket[bytes]) -> None:
        """Answers to one request; what is no request is ignored."""
        frames = router.recv_multipart()
        if len(frames) != _FRAMES or len(frames[-1]) != _SEQUENCE_BYTES:
            return
        client, _, first = frames
        for number, payload in self._sent:
            if number >= first:
                router.send_multipart((client, b"", self._topic, number, payload), zmq.DONTWAIT)
        router.send_multipart((client, b"", b"", _END, b""), zmq.DONTWAIT)
