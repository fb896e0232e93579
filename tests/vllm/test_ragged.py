"""Documents whose heads differ in length, in any codec, inside vLLM's own blocks: word for word what kvfold gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfold
from kvfold.packed import pack
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.vllm.engine import Engine, save_tiny, transfer
from tests.vllm.own_words import own_words

TEXT = kvfold.example_text()
OTHER = TEXT[len(TEXT) // 3 :] + TEXT[: len(TEXT) // 3]
INT4 = "kvzip + global + 8x + int4"
DOCUMENTS = (
    (TEXT, INT4),
    (OTHER, INT4),
    (TEXT, "kvzip + global + 4x"),
    (TEXT, "keydiff + ada + 4x"),
    (TEXT, "keydiff + uniform + 4x + fit"),
    (TEXT, "kvzip + ada + 4x + codec(k=int8, v=fp8)"),
    (TEXT, "keydiff + global + 4x + kivi4"),
    (TEXT, "keydiff + ada + 4x + int2(layers=1::2)"),
)
QUESTIONS = ("Who?", "What is the code of the wine cellar, and where is the key?", "Name the parrot.")
PLAIN = ("An ordinary prompt in the same batch. " * 20, "Another one.")
MAX_TOKENS = 8


class Story:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = kvfold.load(str(save_tiny(folder / "model")), dtype="float32", device="cpu", memory="512MB")
        tier = SharedDiskTier(folder / "store")
        self.packed = [pack(model, text, policy, tier, ragged=True) for text, policy in DOCUMENTS]
        small = pack(model, TEXT, "keydiff + global + 8x + int4", tier, ragged=True, block_size=64)
        both = list(zip(DOCUMENTS, self.packed, strict=True))
        self.expected = [own_words(model, text, packed, QUESTIONS, MAX_TOKENS) for (text, _), packed in both]
        with kvfold.Session(model, self.packed[0].policy) as session:
            session.extend(TEXT)
            self.lens = session.stats().slots
        params = {"max_tokens": MAX_TOKENS}
        plain = [{"ids": model.tokenizer(text)["input_ids"], "params": params} for text in PLAIN]
        *requests, other_size = [
            {
                "ids": packed.prompt_token_ids(model.tokenizer, question),
                "transfer": packed.kv_transfer_params,
                "params": params,
            }
            for packed in (*self.packed, small)
            for question in (QUESTIONS if packed is not small else QUESTIONS[:1])
        ]
        with Engine(folder / "model", transfer=transfer(folder / "store")) as engine:
            self.plain_alone = engine.generate(plain)
            self.refused = engine.generate(requests[:1])[0]
        monkeypatch.setenv("KVFOLD_VLLM_RAGGED", "1")
        with Engine(folder / "model", transfer=transfer(folder / "store")) as engine:
            self.one_by_one = [engine.generate([request])[0] for request in requests]
            self.metrics = engine.metrics()
            order = list(range(len(requests) + len(plain)))
            random.Random(0).shuffle(order)
            answers = engine.generate([[*requests, *plain][number] for number in order])
            by_number = dict(zip(order, answers, strict=True))
            self.together = [by_number[number] for number in range(len(requests))]
            self.plain = [by_number[len(requests) + number] for number in range(len(plain))]
            self.metrics_after = engine.metrics()
            self.other_size = engine.generate([other_size])[0]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield Story(tmp_path_factory.mktemp("ragged"), monkeypatch)


def test_words_are_those_of_kvfold_s_engine(story: Story) -> None:
    expected = [ids for answers in story.expected for ids in answers]
    assert [answer["ids"] for answer in story.one_by_one] == expected
    assert story.expected[0] != story.expected[1]


def test_one_batch_mixes_neither_documents_nor_ordinary_prompts(story: Story) -> None:
    assert [answer["ids"] for answer in story.together] == [answer["ids"] for answer in story.one_by_one]
    assert [answer["ids"] for answer in story.plain] == [answer["ids"] for answer in story.plain_alone]


def test_blocks_are_those_of_the_largest_layer_s_bytes(story: Story) -> None:
    coded, _, plain, *_ = story.packed
    assert len({length for layer in story.lens for length in layer}) > 1
    assert coded.num_slots == 128 < plain.num_slots < plain.num_tokens / 2
    for number, packed in enumerate(story.packed):
        for answer in story.one_by_one[number * len(QUESTIONS) : (number + 1) * len(QUESTIONS)]:
            packed.check(answer["transfer"])
            assert answer["cached"] == packed.num_slots
        assert packed.slack_bytes > 0


def test_a_second_question_loads_nothing(story: Story) -> None:
    assert story.metrics["packed_loads"] == len(DOCUMENTS)
    assert story.metrics_after["packed_loads"] == len(DOCUMENTS)
    assert story.metrics_after["failed_loads"] == story.metrics_after["packed_refusals"] == 0


def test_without_the_backend_it_is_refused(story: Story) -> None:
    assert "KVFOLD_VLLM_RAGGED=1" in story.refused["transfer"]["kvfold_error"]


def test_blocks_of_another_size_are_refused(story: Story) -> None:
    assert "blocks of 64, not 128; pack it with --block-size 128" in story.other_size["transfer"]["kvfold_error"]
