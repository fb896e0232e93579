"""A packed document in vLLM gives word for word what kvfold's own engine gives over the same slots."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.models.pull.pull import resolve
from kvfold.packed import PackedPrefix, pack
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.real import load
from tests.vllm.engine import Engine, transfer

TEXT = kvfold.example_text()
DOCUMENTS = (TEXT, TEXT[len(TEXT) // 3 :] + TEXT[: len(TEXT) // 3])
QUESTIONS = ("What is the code of the wine cellar?", "What is the name of the parrot?", "Who runs the hotel?")
POLICY = "keydiff + uniform + 2x"
MAX_TOKENS = 16


class Story:
    """What kvfold and vLLM answered, in one run of both."""

    def __init__(self, folder: Path) -> None:
        model = load("smollm2-135m", dtype="float32", device="cpu", memory="1GB")
        tier = SharedDiskTier(folder)
        self.packed = [pack(model, text, POLICY, tier) for text in DOCUMENTS]
        tier.close()
        self.expected = [
            self._own(model, text, packed.policy) for text, packed in zip(DOCUMENTS, self.packed, strict=True)
        ]
        name = str(resolve("smollm2-135m"))
        with Engine(name, transfer=transfer(folder)) as engine:
            self.block_size = engine.block_size
            self.answers = [
                [engine.ask(packed.prompt_token_ids(model.tokenizer, question), **self._named(packed))
                 for question in QUESTIONS]
                for packed in self.packed
            ]  # fmt: skip
            together = [(packed, question) for question in QUESTIONS for packed in self.packed]
            random.Random(0).shuffle(together)
            requests = [self._request(packed, model.tokenizer, question) for packed, question in together]
            self.together = list(zip(together, engine.generate(requests), strict=True))
            self.metrics = engine.metrics()

    def _own(self, model: Any, text: str, policy: str) -> list[list[int]]:
        with kvfold.Session(model, policy) as session:
            session.extend(text)
            return [session.ask(question, max_new_tokens=MAX_TOKENS).token_ids for question in QUESTIONS]

    def _named(self, packed: PackedPrefix) -> dict[str, Any]:
        return {"transfer": packed.kv_transfer_params, "max_tokens": MAX_TOKENS}

    def _request(self, packed: PackedPrefix, tokenizer: Any, question: str) -> dict[str, Any]:
        ids = packed.prompt_token_ids(tokenizer, question)
        return {"ids": ids, "transfer": packed.kv_transfer_params, "params": {"max_tokens": MAX_TOKENS}}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    yield Story(tmp_path_factory.mktemp("store"))


def test_words_are_those_of_kvfold_s_engine(story: Story) -> None:
    found = [[answer["ids"] for answer in answers] for answers in story.answers]
    assert found == story.expected
    assert story.expected[0] != story.expected[1]


def test_vllm_holds_slots_and_not_tokens(story: Story) -> None:
    for packed, answers in zip(story.packed, story.answers, strict=True):
        assert packed.num_slots % story.block_size == 0 and packed.num_slots < 0.6 * packed.num_tokens
        assert [answer["cached"] for answer in answers] == [packed.num_slots] * len(QUESTIONS)


def test_answers_say_which_entry_was_served(story: Story) -> None:
    for packed, answers in zip(story.packed, story.answers, strict=True):
        for answer in answers:
            packed.check(answer["transfer"])
            assert answer["transfer"]["kvfold_tokens"] == packed.num_tokens


def test_documents_are_never_mixed_in_one_batch(story: Story) -> None:
    for (packed, question), answer in story.together:
        assert answer["ids"] == story.expected[story.packed.index(packed)][QUESTIONS.index(question)]


def test_a_second_question_loads_nothing(story: Story) -> None:
    assert story.metrics["packed_loads"] == len(DOCUMENTS)
    assert story.metrics["packed_refusals"] == story.metrics["failed_loads"] == 0
