"""KV events against vLLM's own: the same bytes from both encoders, and the same frames from both publishers."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; docs/vllm.md tells how to run these tests")
pytest.importorskip("zmq", reason="KV events need pip install 'kvfold[events]'")

import msgspec
from vllm.distributed import kv_events as theirs

from kvfold.store.kv_events import messages as ours
from kvfold.store.kv_events.publisher import KvEventPublisher
from tests.serve.replicas.ports import free_port
from tests.store.kv_events.router import replay, subscribed

HASHES = [bytes([number]) * 32 for number in (1, 2)]
STORED: dict[str, Any] = {
    **{"block_hashes": HASHES, "parent_block_hash": None, "token_ids": [0, 255, 70_000, 1 << 31], "block_size": 2},
    **{"lora_id": None, "medium": "STORAGE", "lora_name": None, "extra_keys": [("kvfold", "policy", "salt")] * 2},
}
REMOVED: dict[str, Any] = {"block_hashes": HASHES, "medium": "GPU"}


def events(of: Any) -> list[Any]:
    second = {**STORED, "parent_block_hash": HASHES[0], "extra_keys": None}
    return [of.AllBlocksCleared(), of.BlockStored(**STORED), of.BlockStored(**second), of.BlockRemoved(**REMOVED)]


@pytest.mark.parametrize("rank", [None, 0, 3])
def test_bytes_are_vllm_s(rank: int | None) -> None:
    encode = msgspec.msgpack.encode
    found = encode(ours.EventBatch(1.25, events(ours), rank))
    assert found == encode(theirs.KVEventBatch(1.25, events(theirs), rank))
    assert msgspec.msgpack.decode(found, type=theirs.KVEventBatch).events == events(theirs)


def test_media_are_vllm_s() -> None:
    assert (ours.MEDIUM_GPU, ours.MEDIUM_CPU) == (theirs.MEDIUM_GPU, theirs.MEDIUM_CPU)
    assert ours.MEDIUM_STORAGE == theirs.MEDIUM_STORAGE


def test_frames_and_replays_are_vllm_s() -> None:
    """One client reads both publishers; the times of batches are all that differs."""
    ports = [f"tcp://*:{free_port()}" for _ in range(2)]
    vllm_s = theirs.ZmqEventPublisher(0, endpoint=ports[0], replay_endpoint=ports[1], topic="kv@a")
    own = KvEventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv@a")
    try:
        found = [
            _read([one.replace("*", "127.0.0.1") for one in ports], lambda event: vllm_s.publish(
                theirs.KVEventBatch(time.time(), [event])), theirs),
            _read(own.endpoints, own.publish, ours),
        ]  # fmt: skip
    finally:
        own.close()
        vllm_s.shutdown()
    assert found[0] == found[1]


def _read(endpoints: list[str], publish: Any, of: Any) -> list[Any]:
    """Frames that a subscriber heard, and those of a replay, without times."""
    with subscribed(endpoints[0], "kv@") as sub:
        while not sub.poll(20):
            publish(of.AllBlocksCleared())
        while sub.poll(500):
            last = sub.recv_multipart()
        first = int.from_bytes(last[1], "big") + 1
        for event in events(of):
            publish(event)
            time.sleep(0.3)  # a batch each
        heard = [sub.recv_multipart() for _ in events(of)]
    again = replay(endpoints[1], first)
    assert [tuple(one) for one in heard] == again
    return [(topic, int.from_bytes(number, "big") - first, _untimed(payload)) for topic, number, payload in again]


def _untimed(payload: bytes) -> Any:
    return payload[:2], payload[10:]
