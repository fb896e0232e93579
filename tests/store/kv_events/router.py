"""A router's side of KV events: what it knows of a server's blocks, and sockets that subscribe and ask for replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import zmq

from kvfold.store.kv_events.blocks import Change
from kvfold.store.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored

END = (-1).to_bytes(8, "big", signed=True)
TIMEOUT_MS = 30_000


class Router:
    """Blocks by medium: hash -> parent and token ids. A block that is stored twice or removed in vain is an error."""

    def __init__(self) -> None:
        self.blocks: dict[str, dict[bytes, tuple[bytes | None, list[int]]]] = {}
        self.extra: set[tuple[str, ...]] = set()
        self.num_cleared = 0

    def hear(self, event: Change) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            self.num_cleared += 1
        elif isinstance(event, BlockRemoved):
            for digest in event.block_hashes:
                del self.blocks[str(event.medium)][digest]
        else:
            self._store(event)

    def _store(self, event: BlockStored) -> None:
        known = self.blocks.setdefault(str(event.medium), {})
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        assert event.extra_keys is not None and len(event.extra_keys) == len(event.block_hashes)
        for number, digest in enumerate(event.block_hashes):
            assert digest not in known
            known[digest] = parent, event.token_ids[number * size : (number + 1) * size]
            parent = digest
        self.extra.update(event.extra_keys)

    def prompt(self, medium: str, digest: bytes) -> list[int]:
        """All tokens up to the end of a block; KeyError if a block before it is missing."""
        parent, tokens = self.blocks[medium][digest]
        return tokens if parent is None else self.prompt(medium, parent) + tokens


@contextmanager
def subscribed(endpoint: str, topic: str = "") -> Iterator[Any]:
    """A socket; a message that was sent before it subscribed is lost."""
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        sub.setsockopt(zmq.LINGER, 0)
        sub.subscribe(topic)
        sub.connect(endpoint)
        yield sub


def replay(endpoint: str, first: int) -> list[tuple[bytes, bytes, bytes]]:
    """Topic, number and payload of every batch from `first` on."""
    found: list[tuple[bytes, bytes, bytes]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(endpoint)
        dealer.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            empty, topic, number, payload = dealer.recv_multipart()
            assert empty == b""
            if number == END:
                return found
            found.append((topic, number, payload))


def events_of(payload: bytes) -> list[Any]:
    """Of a batch, without types: as any msgpack reader sees them."""
    found: list[Any] = msgspec.msgpack.decode(payload)[1]
    return found
