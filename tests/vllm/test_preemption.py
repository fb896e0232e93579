"""Too few blocks for all requests at once: preempted ones load again, and every answer is that of a roomy engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.packed import pack
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.vllm.engine import Engine, save_tiny, transfer

NUM_BLOCKS = 18
MAX_TOKENS = 150  # of packed requests: they need a second block for their own tokens
POLICIES = {"keydiff + uniform + 4x": False, "keydiff + global + 4x + int4": True, "keydiff + global + 4x": True}


class Story:
    def __init__(self, folder: Path) -> None:
        model = kvfold.load(str(save_tiny(folder / "model")), dtype="float32", device="cpu", memory="512MB")
        tier, text = SharedDiskTier(folder / "store"), kvfold.example_text()
        self.packed = [
            pack(model, text[start:], policy, tier, ragged=ragged)
            for start in (0, 70)
            for policy, ragged in POLICIES.items()
        ]
        draw = random.Random(3)
        requests: list[dict[str, Any]] = [
            {
                "ids": draw.choices(range(49152), k=490 + 5 * number),
                "params": {"max_tokens": 40, "ignore_eos": True},
            }
            for number in range(4)
        ]
        requests += [
            {
                "ids": one.prompt_token_ids(model.tokenizer, "Who?"),
                "transfer": one.kv_transfer_params,
                "params": {"max_tokens": MAX_TOKENS, "ignore_eos": True},
            }
            for one in self.packed
        ]
        with Engine(folder / "model", transfer=transfer(folder / "store")) as roomy:
            self.expected = [roomy.generate([request])[0] for request in requests]
            roomy.flush()
        self.found, self.metrics, self.preemptions = {}, {}, {}
        for has_prefix_cache in (False, True):
            with Engine(
                folder / "model",
                transfer=transfer(folder / "store"),
                num_gpu_blocks_override=NUM_BLOCKS,
                max_model_len=1024,
                enable_prefix_caching=has_prefix_cache,
            ) as tight:
                self.found[has_prefix_cache] = tight.generate(requests)
                self.metrics[has_prefix_cache] = tight.metrics()
                self.preemptions[has_prefix_cache] = tight.counter("vllm:num_preemptions")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("KVFOLD_VLLM_RAGGED", "1")
        yield Story(tmp_path_factory.mktemp("preemption"))


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_requests_were_preempted_and_loaded_again(story: Story, has_prefix_cache: bool) -> None:
    metrics = story.metrics[has_prefix_cache]
    assert story.preemptions[has_prefix_cache] > 0 and metrics["failed_loads"] == 0
    assert metrics["packed_loads"] > len(story.packed) or has_prefix_cache


@pytest.mark.parametrize("has_prefix_cache", [False, True])
def test_answers_are_those_of_a_roomy_engine(story: Story, has_prefix_cache: bool) -> None:
    found = story.found[has_prefix_cache]
    assert [answer["ids"] for answer in found] == [answer["ids"] for answer in story.expected]
    for packed, answer in zip(story.packed, found[4:], strict=True):
        packed.check(answer["transfer"])
