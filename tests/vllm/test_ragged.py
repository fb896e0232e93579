"""Documents whose heads differ in length, inside vLLM's own blocks: word for word what kvfold's engine gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfold
from kvfold.packed import pack
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.vllm.engine import Engine, save_tiny, transfer
from tests.vllm.own_words import own_words

TEXT = kvfold.example_text()
POLICIES = (
    "keydiff + ada + 4x",
    "kvzip + global + 4x",
    "keydiff + uniform + 4x + fit",
    "kvzip + global + 8x + int4",
    "kvzip + ada + 4x + codec(k=int8, v=fp8)",
    "keydiff + global + 4x + kivi4",
    "keydiff + ada + 4x + int2(layers=1::2)",
)
QUESTIONS = ("Who?", "What is the code of the wine cellar, and where is the key?")
PLAIN = "An ordinary prompt in the same batch. " * 20
MAX_TOKENS = 8


class Story:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = kvfold.load(str(save_tiny(folder / "model")), dtype="float32", device="cpu", memory="512MB")
        tier = SharedDiskTier(folder / "store")
        self.packed = [pack(model, TEXT, policy, tier, ragged=True) for policy in POLICIES]
        self.lens, self.expected = [], []
        for packed in self.packed:
            with kvfold.Session(model, packed.policy) as session:
                session.extend(TEXT)
                self.lens.append(session.stats().slots)
            self.expected.append(own_words(model, TEXT, packed, QUESTIONS, MAX_TOKENS))
        plain = {"ids": model.tokenizer(PLAIN)["input_ids"], "params": {"max_tokens": MAX_TOKENS}}
        requests = [
            {
                "ids": packed.prompt_token_ids(model.tokenizer, question),
                "transfer": packed.kv_transfer_params,
                "params": {"max_tokens": MAX_TOKENS},
            }
            for packed in self.packed
            for question in QUESTIONS
        ]
        with Engine(folder / "model", transfer=transfer(folder / "store")) as engine:
            self.plain_alone = engine.generate([plain])[0]
            self.refused = engine.generate(requests[:1])[0]
        monkeypatch.setenv("KVFOLD_VLLM_RAGGED", "1")
        with Engine(folder / "model", transfer=transfer(folder / "store")) as engine:
            self.one_by_one = [engine.generate([request])[0] for request in requests]
            *self.together, self.plain = engine.generate([*requests, plain])
            self.metrics = engine.metrics()


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Story(tmp_path_factory.mktemp("ragged"), monkeypatch)


def test_words_are_those_of_kvfold_s_engine(story: Story) -> None:
    expected = [ids for answers in story.expected for ids in answers]
    assert [answer["ids"] for answer in story.one_by_one] == expected
    assert [answer["ids"] for answer in story.together] == expected


def test_heads_differ_and_blocks_are_those_of_their_mean(story: Story) -> None:
    for packed, lens in zip(story.packed[:2], story.lens[:2], strict=True):
        assert len({length for layer in lens for length in layer}) > 1
        assert packed.num_slots < packed.num_tokens / 2
        assert packed.num_slots >= max(sum(layer) / len(layer) for layer in lens)
    for answer, packed in zip(story.one_by_one[::2], story.packed, strict=True):
        packed.check(answer["transfer"])
        assert answer["cached"] == packed.num_slots


def test_other_requests_of_the_batch_are_vllm_s_own(story: Story) -> None:
    assert story.plain["ids"] == story.plain_alone["ids"]


def test_without_the_backend_it_is_refused(story: Story) -> None:
    assert "KVFOLD_VLLM_RAGGED=1" in story.refused["transfer"]["kvfold_error"]
