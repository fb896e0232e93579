"""Packed documents that are damaged, incomplete or cancelled while they load: never answered from, and well again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.packed import PackedPrefix, pack
from kvfold.store.entry.format import EntryReader, encode
from kvfold.store.key import Binding, Key
from kvfold.store.tiers.disk import path_of
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.vllm.engine import Answer, Engine, save_tiny, transfer
from tests.vllm.own_words import own_words

TEXT = kvfold.example_text()
KINDS = {"uniform": "keydiff + uniform + 4x", "ragged": "keydiff + global + 8x + int4"}
QUESTIONS = ("Who?",)
MAX_TOKENS = 8


def key_of(packed: PackedPrefix) -> Key:
    key = Key.parse(packed.entry)
    assert key is not None
    return key


def without_last_layer(path: Path, packed: PackedPrefix) -> bytes:
    """The same entry, with all its digests right."""
    with path.open("rb") as file:
        reader = EntryReader(file, key_of(packed), None)
        blocks = dict(reader.blocks())
    blocks.popitem()
    facts: dict[str, Any] = {**reader.facts, "tenant": ""}
    return encode(key_of(packed), Binding(**facts), blocks, Lease(0.0, 1e6, 0.0))


class Victim:
    """What one engine said on one document, damaged in every way, before it was first loaded."""

    def __init__(self, engine: Engine, model: kvfold.Model, store: Path, packed: PackedPrefix) -> None:
        self.packed, self.expected = packed, own_words(model, TEXT, packed, QUESTIONS, MAX_TOKENS)[0]
        ids = packed.prompt_token_ids(model.tokenizer, QUESTIONS[0])
        self._request = {"ids": ids, "transfer": packed.kv_transfer_params, "params": {"max_tokens": MAX_TOKENS}}
        self._engine, self._path = engine, path_of(store, key_of(packed))
        whole = self._path.read_bytes()
        self.refused = {
            "corrupt": self._with(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]),
            "truncated": self._with(whole[: len(whole) // 2]),
            "foreign": self._with(without_last_layer(self._path, packed)),
        }
        for num_steps in (1, 2):  # while it loads, and when its first token is computed
            engine.cancel(self._request, num_steps)
        self.after = [engine.generate([self._request])[0] for _ in range(2)]

    def _with(self, data: bytes) -> Answer:
        """Asked with other content in the entry's file, which is whole again afterwards."""
        whole, expiry = self._path.read_bytes(), self._path.stat().st_mtime
        self._write(data, expiry)
        answer = self._engine.generate([self._request])[0]
        assert not self._path.exists(), "it is in quarantine"
        self._write(whole, expiry)
        return answer

    def _write(self, data: bytes, expiry: float) -> None:
        self._path.write_bytes(data)
        os.utime(self._path, (expiry, expiry))


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Victim]]:
    folder = tmp_path_factory.mktemp("damage")
    model = kvfold.load(str(save_tiny(folder / "model")), dtype="float32", device="cpu", memory="512MB")
    tier = SharedDiskTier(folder / "store")
    packed = {kind: pack(model, TEXT, policy, tier, ragged=kind == "ragged") for kind, policy in KINDS.items()}
    tier.close()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("KVFOLD_VLLM_RAGGED", "1")
        with Engine(folder / "model", transfer=transfer(folder / "store")) as engine:
            yield {kind: Victim(engine, model, folder / "store", one) for kind, one in packed.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_is_refused_with_its_reason(kind: str, victims: dict[str, Victim]) -> None:
    for reason, answer in victims[kind].refused.items():
        assert f"damaged ({reason})" in answer["transfer"]["kvfold_error"]
        assert len(answer["ids"]) == 1 and answer["cached"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_was_cancelled_while_it_loaded_harms_none(kind: str, victims: dict[str, Victim]) -> None:
    victim = victims[kind]
    for answer in victim.after:
        victim.packed.check(answer["transfer"])
        assert answer["ids"] == victim.expected and answer["cached"] == victim.packed.num_slots


def test_slots_are_whole_blocks(victims: dict[str, Victim]) -> None:
    assert all(victim.packed.num_slots % 128 == 0 for victim in victims.values())
