"""Prompts begin with stored blocks: the same tokens, after restarts, beside damage, and never with other weights."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfold.store.tiers.disk import key_of
from tests.vllm.engine import Answer, Engine, save_tiny, transfer

LONG = random.Random(0).choices(range(49152), k=2000)
SHORT = LONG[:700]
BATCH = {"max_num_batched_tokens": 512, "enable_chunked_prefill": True}  # prompts are prefilled in several steps


def entries(store: Path) -> dict[int, Path]:
    """Files of entries by the token they begin at."""
    found = [(key_of(path), path) for path in (store / "entries").glob("*/*/*")]
    return {key.start: path for key, path in found if key is not None}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1000] ^= 1
    expiry = path.stat().st_mtime
    path.write_bytes(data)
    os.utime(path, (expiry, expiry))


class Story:
    """One store, and five engines one after the other."""

    def __init__(self, folder: Path) -> None:
        model, store = save_tiny(folder / "model"), folder / "store"
        with Engine(model, enable_prefix_caching=False, **BATCH) as plain:
            self.plain = {"short": plain.ask(SHORT), "long": plain.ask(LONG)}
        with Engine(model, transfer=transfer(store), enable_prefix_caching=False, **BATCH) as engine:
            self.block_size = engine.block_size
            self.cold = engine.ask(SHORT)
            engine.flush()
            self.stored = sorted(entries(store))
            self.warm = engine.ask(SHORT)
            self.tail = [self._asked(engine, LONG), self._asked(engine, LONG)]
            self.salted = engine.ask(SHORT, salt="another tenant")
            requests = [{"ids": ids, "params": {"max_tokens": 8}} for ids in (LONG, SHORT, LONG[1:], SHORT)]
            self.together = engine.generate(requests)
            engine.flush()
            self._damage(engine, store)
            self.metrics = engine.metrics()
        with Engine(model, transfer=transfer(store), **BATCH) as again:
            self.restarted = again.ask(LONG)
            self.local = again.ask(LONG)
            self.restarted_metrics = again.metrics()
        save_tiny(folder / "model", seed=1)
        with Engine(model, transfer=transfer(store), **BATCH) as other:
            self.other_weights = other.ask(SHORT)

    def _asked(self, engine: Engine, ids: list[int]) -> Answer:
        found = engine.ask(ids)
        engine.flush()
        return found

    def _damage(self, engine: Engine, store: Path) -> None:
        """A flipped byte, then a file cut in half, then one that is gone."""
        flip(entries(store)[256])
        self.flipped = engine.ask(LONG)
        self.flipped_metrics = engine.metrics()
        cut = entries(store)[128]
        data = cut.read_bytes()
        with cut.open("r+b") as file:
            file.truncate(len(data) // 2)
        self.truncated = engine.ask(LONG)
        entries(store)[0].unlink()
        self.missing = engine.ask(LONG)
        engine.flush()
        self.quarantined = len(list((store / "quarantine").glob("*.kvp")))
        self.repaired = sorted(entries(store))


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    yield Story(tmp_path_factory.mktemp("prefixes"))


def assert_same(found: Answer, expected: Answer) -> None:
    assert found["ids"] == expected["ids"]
    for step, other in zip(found["logprobs"], expected["logprobs"], strict=True):
        assert step == pytest.approx(other, abs=1e-3)


def test_the_same_tokens_and_logits_with_and_without_it(story: Story) -> None:
    assert_same(story.cold, story.plain["short"])
    assert_same(story.warm, story.plain["short"])
    assert len(set(story.plain["long"]["ids"])) > 1, "a model that repeats one token proves nothing"


def test_whole_blocks_are_stored_and_hit(story: Story) -> None:
    assert story.cold["cached"] == 0
    assert story.stored == [0, 128, 256, 384, 512]
    assert story.warm["cached"] == 5 * story.block_size == 640


def test_the_tail_behind_a_hit_is_stored_too(story: Story) -> None:
    assert [answer["cached"] for answer in story.tail] == [640, 1920]
    for answer in story.tail:
        assert_same(answer, story.plain["long"])


def test_salts_share_nothing(story: Story) -> None:
    assert story.salted["cached"] == 0
    assert_same(story.salted, story.plain["short"])


def test_prompts_of_one_batch_do_not_mix(story: Story) -> None:
    long, short, shifted, again = story.together
    assert_same(long, story.plain["long"])
    assert_same(short, story.plain["short"])
    assert_same(again, story.plain["short"])
    assert (long["cached"], short["cached"], shifted["cached"]) == (1920, 640, 0)


def test_damage_is_computed_again_and_counted(story: Story) -> None:
    for answer in (story.flipped, story.truncated, story.missing):
        assert_same(answer, story.plain["long"])
    assert story.flipped_metrics["failed_loads"] == 1
    assert story.quarantined >= 1
    assert story.repaired == sorted(range(0, 1920, 128)), "what failed is stored again"


def test_a_restart_hits_at_once(story: Story) -> None:
    assert story.restarted["cached"] == 1920
    assert_same(story.restarted, story.plain["long"])
    assert story.restarted_metrics["loaded_tokens"] == 1920, "vLLM's own prefix cache answers the second one"
    assert story.local["cached"] == 1920


def test_other_weights_at_the_same_path_do_not_hit(story: Story) -> None:
    assert story.other_weights["cached"] == 0
    assert story.other_weights["ids"] != story.plain["short"]["ids"]
