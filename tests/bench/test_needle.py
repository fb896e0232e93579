"""Prompts: the same for the same seed, as long as told, with every needle once and where it belongs; and the score."""

from __future__ import annotations

import re
from itertools import islice
from random import Random

import pytest

from kvfold.bench.haystack import from_text, prose
from kvfold.bench.needle import NUM_KEYS, NUM_VALUES, TASKS, Needle, Needles, hide, score
from kvfold.errors import InputError
from tests.tiny import tokenizer

TOKENIZER = tokenizer()
NUMBER = re.compile(r"\d+")
HIDDEN = re.compile(r"One of the special magic numbers for ([a-z]+-[a-z]+) is: (\d{7})\.")


def _plain() -> object:
    """The same tokenizer for a model that was never taught to chat."""
    found = tokenizer()
    found.chat_template = None
    return found


def test_prompts_are_functions_of_seed_and_index() -> None:
    needles = Needles(TOKENIZER, 900, seed=5)
    again = Needles(tokenizer(), 900, seed=5)
    assert [needles.prompt(i) for i in (2, 0, 1)] == [again.prompt(i) for i in (2, 0, 1)]
    others = [Needles(TOKENIZER, 900, seed=6).prompt(0), needles.prompt(3)]
    assert all(other.expected != needles.prompt(0).expected for other in others)


@pytest.mark.parametrize("num_tokens", (700, 901, 1500, 2777))
@pytest.mark.parametrize("index", range(3))
def test_length_is_at_most_what_was_asked_and_less_by_one_sentence_at_most(num_tokens: int, index: int) -> None:
    longest = max(len(sentence) for sentence in islice(prose(Random(0)), 2000))
    found = Needles(TOKENIZER, num_tokens).prompt(index).num_tokens
    assert num_tokens - longest - 1 <= found <= num_tokens


@pytest.mark.parametrize("index", range(6))
def test_document_holds_the_needles_once_and_no_other_number(index: int) -> None:
    prompt = Needles(TOKENIZER, 1200).prompt(index)
    task = TASKS[index % 3]
    found = HIDDEN.findall(prompt.document)
    assert prompt.task == task
    assert len(found) == NUM_KEYS[task] * NUM_VALUES[task] == len(NUMBER.findall(prompt.document))
    assert len({value for _, value in found}) == len(found)
    assert len({key for key, _ in found}) == NUM_KEYS[task]


@pytest.mark.parametrize("index", range(6))
def test_question_asks_for_the_expected_numbers_and_does_not_tell_them(index: int) -> None:
    prompt = Needles(TOKENIZER, 1200).prompt(index)
    question = TOKENIZER.decode(prompt.question_ids)
    (key,) = set(re.findall(r"for ([a-z]+-[a-z]+) mentioned", question))
    assert sorted(prompt.expected) == sorted(value for name, value in HIDDEN.findall(prompt.document) if name == key)
    assert not NUMBER.search(question)
    assert question.endswith(" are" if len(prompt.expected) > 1 else " is")


def test_prompt_is_a_chat_turn_with_a_begun_reply() -> None:
    prompt = Needles(TOKENIZER, 900).prompt(0)
    text = TOKENIZER.decode(prompt.document_ids + prompt.question_ids)
    assert text.startswith("<s><user>A special magic number is hidden")
    assert "mentioned in the provided text?<end>\n<assistant>The special magic number for" in text
    assert prompt.document_ids == TOKENIZER(prompt.document, add_special_tokens=False)["input_ids"]


def test_model_without_template_gets_plain_text() -> None:
    prompt = Needles(_plain(), 900).prompt(0)
    text = TOKENIZER.decode(prompt.document_ids + prompt.question_ids)
    assert "<user>" not in text and "provided text?\n\nThe special" in text
    assert prompt.num_tokens <= 900


def test_needles_stand_at_their_depths() -> None:
    sentences = [str(i) for i in range(100)]
    needles = [Needle("late-one", "2", 0.85), Needle("early-one", "1", 0.1), Needle("last-one", "3", 1.0)]
    found = hide(needles, sentences)
    assert [found.index(needle.sentence) for needle in needles] == [86, 10, 102]
    assert [line for line in found if line in sentences] == sentences


def test_depths_of_many_prompts_spread_over_the_document() -> None:
    needles = Needles(TOKENIZER, 1500)
    documents = [needles.prompt(3 * i).document for i in range(40)]
    depths = [document.index("One of the special") / len(document) for document in documents]
    assert min(depths) < 0.25 and max(depths) > 0.75
    assert all(0.2 < sum(low <= depth < low + 0.5 for depth in depths) / 40 < 0.8 for low in (0, 0.5))


@pytest.mark.parametrize("index", range(3))
def test_a_list_of_the_right_numbers_fits_into_the_new_tokens(index: int) -> None:
    prompt = Needles(TOKENIZER, 900).prompt(index)
    lists = (" " + ", ".join(prompt.expected), ":\n\n- " + "\n- ".join(prompt.expected))
    assert all(len(TOKENIZER(text)["input_ids"]) <= prompt.max_new_tokens for text in lists)
    assert prompt.max_new_tokens <= 14 * len(prompt.expected)


def test_too_short_a_prompt_names_the_least() -> None:
    with pytest.raises(InputError, match="too short; give at least") as error:
        Needles(TOKENIZER, 300).prompt(2)
    least = int(NUMBER.findall(str(error.value))[-1])
    assert Needles(TOKENIZER, least).prompt(2).num_tokens == least
    with pytest.raises(InputError, match="too short"):
        Needles(TOKENIZER, least - 1).prompt(2)


def test_other_haystacks_are_used() -> None:
    prompt = Needles(TOKENIZER, 900, haystack=from_text("Nothing to see. Move along.")).prompt(0)
    rest = HIDDEN.sub("", prompt.document)
    assert rest.count("Nothing to see.") > 5 and rest.count("Move along.") > 5


@pytest.mark.parametrize(
    ("answer", "expected", "found"),
    (
        (" 1234567.", ("1234567",), 1.0),
        (" 1234568.", ("1234567",), 0.0),
        ("", ("1234567",), 0.0),
        (" 123 4567", ("1234567",), 0.0),
        ("2222222 and 1111111", ("1111111", "2222222", "3333333", "4444444"), 0.5),
        ("1111111, 1111111", ("1111111", "2222222"), 0.5),
    ),
)
def test_score_is_the_share_found(answer: str, expected: tuple[str, ...], found: float) -> None:
    assert score(answer, expected) == found
