"""Frames of the publisher: their bytes, numbers, replay after a gap, and a subscriber that does not read."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from kvfold.errors import InputError
from kvfold.store.kv_events import publisher as module
from kvfold.store.kv_events.messages import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvfold.store.kv_events.publisher import KvEventPublisher
from tests.store.kv_events.router import events_of, replay, subscribed

ANY = "tcp://127.0.0.1:0"
STORED = BlockStored([b"\1" * 32], None, [5, 70_000], 2, None, "GPU", None, [("kvfold", "policy", "salt")])
REMOVED = BlockRemoved([b"\1" * 32, b"\2" * 32], "CPU")


@contextmanager
def publishing(**options: Any) -> Iterator[KvEventPublisher]:
    publisher = KvEventPublisher(ANY, ANY, **options)
    try:
        yield publisher
    finally:
        publisher.close()


def settle(publisher: KvEventPublisher, count: int) -> None:
    """Wait until so many events are through."""
    until = time.monotonic() + 30
    while publisher.num_published < count:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_payloads_are_arrays_of_maps_without_defaults() -> None:
    found = msgspec.msgpack.encode(EventBatch(1.5, [STORED, REMOVED, AllBlocksCleared()], 3))
    text = b"\xa4type\xabBlockStored\xacblock_hashes\x91\xc4\x20" + b"\1" * 32
    text += b"\xb1parent_block_hash\xc0\xa9token_ids\x92\x05\xce" + struct.pack(">I", 70_000)
    text += b"\xaablock_size\x02\xa7lora_id\xc0\xa6medium\xa3GPU\xa9lora_name\xc0"
    text += b"\xaaextra_keys\x91\x93\xa6kvfold\xa6policy\xa4salt"
    assert found.startswith(b"\x93\xcb" + struct.pack(">d", 1.5) + b"\x93\x89" + text)
    assert msgspec.msgpack.decode(found) == [
        1.5,
        [
            {
                **{"type": "BlockStored", "block_hashes": [b"\1" * 32], "parent_block_hash": None},
                **{"token_ids": [5, 70_000], "block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None},
                "extra_keys": [["kvfold", "policy", "salt"]],
            },
            {"type": "BlockRemoved", "block_hashes": [b"\1" * 32, b"\2" * 32], "medium": "CPU"},
            {"type": "AllBlocksCleared"},
        ],
        3,
    ]


def test_a_late_subscriber_gets_what_it_missed_by_replay() -> None:
    with publishing(topic="kv@a") as publisher:
        for number in range(5):
            publisher.publish(STORED)
            settle(publisher, number + 1)
        with subscribed(publisher.endpoints[0], "kv@") as sub:
            until_heard(publisher, sub)
            publisher.publish(REMOVED)
            topic, number_bytes, payload = sub.recv_multipart()
            number = int.from_bytes(number_bytes, "big")
            assert topic == b"kv@a" and number >= 5 and events_of(payload)[0]["type"] == "BlockRemoved"
        missed = replay(publisher.endpoints[1], 2)
        assert [int.from_bytes(one[1], "big") for one in missed] == list(range(2, number + 1))
        assert missed[-1] == (topic, number_bytes, payload) and missed[0][2] != payload
        assert replay(publisher.endpoints[1], number + 1) == []
        assert publisher.num_dropped == 0


def until_heard(publisher: KvEventPublisher, sub: Any) -> None:
    """Publish until a subscription has reached the publisher, and read all of it."""
    while not sub.poll(20):
        publisher.publish(AllBlocksCleared())
    while sub.poll(200):
        sub.recv_multipart()


def test_what_is_no_replay_request_is_ignored() -> None:
    with publishing() as publisher, zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        publisher.publish(STORED)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(publisher.endpoints[1])
        for frames in ((b"",), (b"", b"short"), (b"", b"", b"", b"more"), (b"x" * 100,)):
            dealer.send_multipart(frames)
        assert not dealer.poll(100)
        assert len(replay(publisher.endpoints[1], 0)) == 1


def test_a_subscriber_that_does_not_read_delays_nobody_and_is_counted() -> None:
    big = BlockStored([b"\1" * 32], None, [70_000] * 20_000, 20_000, None, "CPU", None)
    with publishing(buffer=64) as publisher, zmq.Context() as context, context.socket(zmq.SUB) as slow:
        slow.set_hwm(1)
        slow.setsockopt(zmq.LINGER, 0)
        slow.subscribe("")
        slow.connect(publisher.endpoints[0])
        until_heard(publisher, slow)
        with subscribed(publisher.endpoints[0]) as sub:
            until_heard(publisher, sub)
            for _ in range(300):
                publisher.publish(big)
                sub.recv_multipart()  # at once, whatever the other does
            assert 0 < publisher.num_dropped < 300
        assert len(replay(publisher.endpoints[1], 0)) == 64


def test_events_that_find_the_queue_full_leave_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_QUEUED", 0)
    with publishing() as publisher:
        publisher.publish(STORED)
        assert publisher.num_dropped == 1
        monkeypatch.setattr(module, "MAX_QUEUED", 10)
        publisher.publish(REMOVED)
        settle(publisher, 1)
        ((_, number, _),) = replay(publisher.endpoints[1], 0)
        assert int.from_bytes(number, "big") == 1


def test_an_address_in_use_is_told() -> None:
    with publishing() as publisher, pytest.raises(InputError, match="Address already in use"):
        KvEventPublisher(publisher.endpoints[0])
