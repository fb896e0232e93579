"""SmolLM2 in vLLM over packed documents, uniform at 4x and ragged in int4 at 8x: the words of kvfold's engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfold
from kvfold.models.pull.pull import resolve
from kvfold.packed import pack
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.real import load
from tests.vllm.engine import Engine, transfer
from tests.vllm.own_words import own_words

TEXT = kvfold.example_text()
DOCUMENTS = (TEXT, TEXT[len(TEXT) // 3 :] + TEXT[: len(TEXT) // 3])
QUESTIONS = ("What is the code of the wine cellar?", "What is the name of the parrot?", "Who runs the hotel?")
POLICIES = {"keydiff + uniform + 4x": False, "kvzip + global + 8x + int4": True}
MAX_TOKENS = 12


class Story:
    def __init__(self, folder: Path) -> None:
        model = load("smollm2-135m", dtype="float32", device="cpu", memory="1GB")
        tier = SharedDiskTier(folder)
        cases = [(text, policy) for policy in POLICIES for text in DOCUMENTS]
        self.packed = [pack(model, text, policy, tier, ragged=POLICIES[policy]) for text, policy in cases]
        tier.close()
        both = list(zip(cases, self.packed, strict=True))
        self.expected = [own_words(model, text, packed, QUESTIONS, MAX_TOKENS) for (text, _), packed in both]
        requests = [
            {
                "ids": packed.prompt_token_ids(model.tokenizer, question),
                "transfer": packed.kv_transfer_params,
                "params": {"max_tokens": MAX_TOKENS},
            }
            for packed in self.packed
            for question in QUESTIONS
        ]
        with Engine(str(resolve("smollm2-135m")), transfer=transfer(folder)) as engine:
            answers = [engine.generate([request])[0] for request in requests[::3]]
            self.first = [answer["ids"] for answer in answers]
            self.found = [answer["ids"] for answer in engine.generate(requests)]
            self.metrics = engine.metrics()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("KVFOLD_VLLM_RAGGED", "1")
        yield Story(tmp_path_factory.mktemp("store"))


def test_words_are_those_of_kvfold_s_engine(story: Story) -> None:
    assert story.first == [answers[0] for answers in story.expected]
    assert story.found == [ids for answers in story.expected for ids in answers]
    assert len({tuple(ids) for ids in story.found}) > len(QUESTIONS)


def test_int4_at_8x_takes_one_block_and_each_document_one_load(story: Story) -> None:
    uniform, _, ragged, _ = story.packed
    assert ragged.num_slots < uniform.num_slots < uniform.num_tokens / 2
    assert story.metrics["packed_loads"] == len(story.packed)
