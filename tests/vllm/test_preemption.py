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
MAX_TOKENS = 40


class Story:
    def __init__(self, folder: Path) -> None:
        model = kvfold.load(str(save_tiny(folder / "model")), dtype="float32", device="cpu", memory="512MB")
        tier, text = SharedDiskTier(folder / "store"), kvfold.example_text()
        self.packed = [pack(model, text[start:], "keydiff + uniform + 4x", tier) for start in (0, 70)]
        draw = random.Random(3)
        params = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
        requests: list[dict[str, Any]] = [
            {"ids": draw.choices(range(49152), k=490 + 5 * number), "params": params} for number in range(4)
        ]
        requests += [
            {"ids": one.prompt_token_ids(model.tokenizer, "Who?"), "transfer": one.kv_transfer_params, "params": params}
            for one in self.packed
        ]
        with Engine(folder / "model", transfer=transfer(folder / "store")) as roomy:
            self.expected = [roomy.generate([request])[0] for request in requests]
            roomy.flush()
        with Engine(
            folder / "model",
            transfer=transfer(folder / "store"),
            num_gpu_blocks_override=NUM_BLOCKS,
            max_model_len=1024,
            enable_prefix_caching=False,
        ) as tight:
            self.found = tight.generate(requests)
            self.metrics = tight.metrics()
            self.preemptions = tight.counter("vllm:num_preemptions")


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    yield Story(tmp_path_factory.mktemp("preemption"))


def test_requests_were_preempted_and_loaded_again(story: Story) -> None:
    assert story.preemptions > 0
    first = sum(len(answer["ids"]) > 0 for answer in story.found)
    assert first == len(story.found) and story.metrics["failed_loads"] == 0
    assert story.metrics["packed_loads"] >= len(story.packed)


def test_answers_are_those_of_a_roomy_engine(story: Story) -> None:
    assert [answer["ids"] for answer in story.found] == [answer["ids"] for answer in story.expected]
    for packed, answer in zip(story.packed, story.found[-2:], strict=True):
        packed.check(answer["transfer"])
