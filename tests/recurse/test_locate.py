"""Replies are looked up in the text: exact spans, whole sentences as quotes, and nothing that is not there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.recurse.locate import _candidates, locate, says_nothing, short_answer

TEXT = (
    "Rain fell at 4410. Please note that Lucia's locker number is\n4410. The door of Rosa is 12 feet wide! "
    "漢字は四文字。"
)
ASKED = "What is Lucia's locker number?"


def _quote(answer: str, text: str = TEXT, question: str = ASKED) -> str | None:
    found = locate(answer, text, question)
    return None if found is None else text[found.quote_start : found.quote_end]


@pytest.mark.parametrize(
    "answer",
    [
        "4410",
        "Lucia's locker number is 4410",
        "lucia's LOCKER number",
        'It says "locker number is 4410" there',
        "It is locker number is 4410",
    ],
)
def test_the_quote_is_the_sentence_that_has_the_words_and_most_of_the_question(answer: str) -> None:
    assert _quote(answer) == "Please note that Lucia's locker number is\n4410."


@pytest.mark.parametrize(
    "answer", ["441", "2", "410", "Rosa's locker", "purple elephants", "", "number 4410 is hers now and then"]
)
def test_words_that_are_not_in_the_text_have_no_place(answer: str) -> None:
    assert locate(answer, TEXT, ASKED) is None


OTHERS = "Please note that Tilda's extension is 3222. Ada came late. She has extension 77, as Emil said."


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        ("Emil's extension is 3222", "What is Emil's extension?"),
        ("Note that Emil's extension is 3222", "Which extension has he?"),
        ("Tilda's extension is 3223", "What is Tilda's extension?"),
    ],
)
def test_names_and_numbers_are_those_of_the_quote(answer: str, question: str) -> None:
    assert locate(answer, OTHERS, question) is None
    assert locate(answer.replace("Emil", "Tilda").replace("3223", "3222"), OTHERS, question) is not None


def test_a_name_may_stand_in_the_sentence_before() -> None:
    assert _quote("Ada has extension 77", OTHERS, "Which extension has Ada?") == "She has extension 77, as Emil said."


def test_words_without_spaces_are_found_inside() -> None:
    assert _quote("四文字") == "漢字は四文字。"


def test_a_sentence_that_is_very_long_is_not_quoted_whole() -> None:
    text = "the bird sings and " * 60 + "the code is 77 and " + "the bird sings and " * 60
    assert _quote("code is 77", text) == "code is 77"


@pytest.mark.parametrize(
    "reply",
    [
        *("nothing here", " Nothing here.", '"nothing"', "no answer", "Not mentioned", "", "The text does not say it."),
        *("The provided text does not mention Rosa.", "There is no information about it", "No mention of a code"),
    ],
)
def test_replies_that_say_nothing(reply: str) -> None:
    assert says_nothing(short_answer(reply))


@pytest.mark.parametrize("reply", ["no 4", "nothing but rain", "Norway", "There is no fee", "the text of 1912", "4410"])
def test_replies_that_say_something(reply: str) -> None:
    assert not says_nothing(short_answer(reply))


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (" The code is 4817. It is", "The code is 4817"),
        ('"4817."', "4817"),
        ("4.5 crowns a day", "4.5 crowns a day"),
        ("yes\nText: more", "yes"),
        (" The answer is 48,000. It was", "48,000"),
        ('Answer: "a green box".', "a green box"),
        ("the answer is: Rosa", "Rosa"),
        ("The answer is not known", "The answer is not known"),
        ("The answers are 4 and 5", "The answers are 4 and 5"),
        ("The answer isn't there", "The answer isn't there"),
    ],
)
def test_an_answer_is_the_first_sentence(reply: str, expected: str) -> None:
    assert short_answer(reply) == expected


@given(st.text(max_size=80), st.text(max_size=30))
def test_whatever_is_found_is_inside_of_the_text_and_of_its_quote(text: str, answer: str) -> None:
    found = locate(short_answer(answer), text, "who?")
    if found is not None:
        assert 0 <= found.quote_start <= found.start < found.end <= found.quote_end <= len(text)


def test_articles_do_not_count_among_the_words_of_an_answer() -> None:
    found = locate("The number 9249", "Rain fell. Rosa has 9249. It went on.", "What is it?")
    assert found is not None and found[2:] == (11, 25)
    assert locate("The big number 9249", "Rain fell. Rosa has 9249. It went on.", "What is it?") is None


def test_an_endless_answer_is_looked_up_in_bounded_time() -> None:
    assert sum(1 for _ in _candidates("1, 2 and " * 20_000)) < 2000


def test_of_many_places_the_one_with_most_words_of_the_question_counts() -> None:
    text = "5 5 5. " * 2000 + "Rosa has 5. " + "5 5. " * 2000
    found = locate("5", text, "What has Rosa?")
    assert found is not None and text[found.quote_start : found.quote_end] == "Rosa has 5."
