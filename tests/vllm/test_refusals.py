"""Requests for packed documents that cannot be served: one token, the reason, and no harm to other requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.packed import PackedPrefix, pack
from kvfold.store.key import Key
from kvfold.store.tiers.disk import path_of
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.vllm.engine import Answer, Engine, save_tiny, transfer

TEXT = kvfold.example_text()
QUESTION = "Who?"
POLICY = "keydiff + uniform + 4x"
MAX_TOKENS = 8


def loaded(folder: Path, dtype: str = "float32") -> kvfold.Model:
    return kvfold.load(str(folder), dtype=dtype, device="cpu", memory="512MB")


def own_words(model: kvfold.Model, text: str, packed: PackedPrefix) -> list[int]:
    with kvfold.Session(model, packed.policy) as session:
        session.extend(text)
        return session.ask(QUESTION, max_new_tokens=MAX_TOKENS).token_ids


class Story:
    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        model = loaded(save_tiny(folder / "model"))
        self.tokenizer = model.tokenizer
        other = loaded(save_tiny(folder / "other", seed=1))
        tier = SharedDiskTier(self.store)
        self.first, self.second = pack(model, TEXT, POLICY, tier), pack(model, TEXT[50:], POLICY, tier)
        halves = pack(model, TEXT, "keydiff + uniform + 150tok", tier, block_size=64)
        foreign = pack(other, TEXT, POLICY, tier)
        half_dtype = pack(loaded(folder / "model", "bfloat16"), TEXT, POLICY, tier)
        tier.close()
        self.expected = own_words(model, TEXT, self.first), own_words(model, TEXT[50:], self.second)
        with Engine(folder / "model", transfer=transfer(self.store)) as engine:
            self._mixed(engine)
            self.refused = {
                "names no entry": engine.ask(self._ids(self.first), MAX_TOKENS),
                "there is no entry": self._named(engine, self.first, kvfold_entry=f"{self.first.entry[:-4]}0000"),
                "is no name of an entry": self._named(engine, self.first, kvfold_entry="../../etc/passwd"),
                "does not begin with the entry's": self._named(engine, self.first, kvfold_entry=self.second.entry),
                "kvfold_slots is 7": self._named(engine, self.first, kvfold_slots=7),
                "no whole blocks; pack it with --block-size 128": self._named(engine, halves),
                "packed with other weights": self._named(engine, foreign),
                "packed in torch.bfloat16, and vLLM runs torch.float32": self._named(engine, half_dtype),
                "nothing behind": engine.ask(
                    self.first.placeholder_ids, MAX_TOKENS, transfer=self.first.kv_transfer_params
                ),
                "prompt_logprobs": self._named(engine, self.first, params={"prompt_logprobs": 1}),
                "repetition_penalty": self._named(engine, self.first, params={"repetition_penalty": 1.2}),
            }
            self._damaged(engine)
            self.after = [self._named(engine, packed) for packed in (self.first, self.second)]
            self.metrics = engine.metrics()

    def _ids(self, packed: PackedPrefix) -> list[int]:
        return packed.prompt_token_ids(self.tokenizer, QUESTION)

    def _named(self, engine: Engine, packed: PackedPrefix, params: dict[str, Any] | None = None, **more: Any) -> Answer:
        named = {**packed.kv_transfer_params, **more}
        if "kvfold_entry" in more:
            del named["kvfold_slots"]
        return engine.ask(self._ids(packed), MAX_TOKENS, transfer=named, params=params or {})

    def _mixed(self, engine: Engine) -> None:
        """A refused request computes placeholders, in one batch with a good one over the same ids, and before it."""
        good = {"ids": self._ids(self.first), "transfer": self.first.kv_transfer_params}
        bad = {"ids": self._ids(self.first), "params": {"max_tokens": MAX_TOKENS}}
        self.bad_first = engine.ask(self._ids(self.first), MAX_TOKENS)
        self.batch = engine.generate([bad, {**good, "params": {"max_tokens": MAX_TOKENS}}, bad])

    def _damaged(self, engine: Engine) -> None:
        """A layer that fails its check when the worker reads it; then the entry is whole again."""
        key = Key.parse(self.second.entry)
        assert key is not None
        path = path_of(self.store, key)
        whole, expiry = path.read_bytes(), path.stat().st_mtime
        path.write_bytes(whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:])
        os.utime(path, (expiry, expiry))
        self.damaged = self._named(engine, self.second)
        self.gone = self._named(engine, self.second)
        path.write_bytes(whole)
        os.utime(path, (expiry, expiry))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    yield Story(tmp_path_factory.mktemp("refusals"))


def test_every_reason_is_told(story: Story) -> None:
    for reason, answer in story.refused.items():
        assert reason in answer["transfer"]["kvfold_error"]
        assert len(answer["ids"]) == 1
        with pytest.raises(kvfold.errors.InputError, match="the packed prefix was refused"):
            story.first.check(answer["transfer"])


def test_what_placeholders_computed_serves_nobody(story: Story) -> None:
    bad, good, again = story.batch
    assert good["ids"] == story.expected[0] and good["cached"] == story.first.num_slots
    story.first.check(good["transfer"])
    for answer in (story.bad_first, bad, again):
        assert "names no entry" in answer["transfer"]["kvfold_error"] and answer["cached"] == 0


def test_a_damaged_entry_is_never_answered_from(story: Story) -> None:
    assert "could not be loaded: it is damaged (corrupt)" in story.damaged["transfer"]["kvfold_error"]
    assert len(story.damaged["ids"]) == 1
    assert "there is no entry" in story.gone["transfer"]["kvfold_error"], "it is in quarantine"
    assert story.metrics["failed_loads"] == 1


def test_all_is_well_afterwards(story: Story) -> None:
    assert [answer["ids"] for answer in story.after] == list(story.expected)
    assert story.expected[0] != story.expected[1]
    assert story.metrics["packed_refusals"] == len(story.refused) + 3 + 2
