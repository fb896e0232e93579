"""Texts and arguments at the edge: white space alone, units that are too long for the size, labels of what is kept."""

from __future__ import annotations

from typing import Any

import pytest

import kvfold
from kvfold.errors import InputError, PolicyError, SizeError
from kvfold.shortening.shorten import shorten_text
from kvfold.shortening.text import plan_of, shorten
from tests import tiny
from tests.shortening.test_guarantees import QUESTION, SELECTORS
from tests.shortening.texts import PROSE

BLANK = "\n \t" * 400
LONG = "word " * 200 + "end."


@pytest.mark.parametrize("by", SELECTORS)
def test_white_space_alone_comes_back(by: str) -> None:
    question = QUESTION if by == "rank" else None
    for units in ("auto", "late", "fixed(7)"):
        found = shorten(BLANK, "4x", by, question=question, units=units, embedder="tfidf", tokenizer=tiny.tokenizer())
        assert found.text == BLANK and found.num_tokens == found.num_original_tokens > 256
    assert (
        shorten_text(BLANK, plan_of(by, "4x"), tokenizer=tiny.tokenizer(), keeps_ends=True, may_stay=True).text == BLANK
    )


@pytest.mark.parametrize(
    ("text", "to", "units", "told"),
    [
        (PROSE, "1e9x", "sentences", r"tokens 1 may stay, and no unit of the text fits: .* or \d+tok$"),
        (LONG, "50%", "sentences", "202 tokens 101 may stay, .*: with one and what must stay there are 202 tokens; "),
        (PROSE, "4x", "fixed", "part the text more finely, such as units=sentences, or shorten to 1x"),
        (PROSE, "8tok", "passages", "part the text more finely, such as units=sentences, or shorten to"),
    ],
)
def test_a_size_into_which_no_unit_fits_is_refused(text: str, to: str, units: str, told: str) -> None:
    with pytest.raises(SizeError, match=told):
        shorten(text, to, keep="none", units=units, embedder="tfidf")


def test_in_a_policy_a_text_stays_whole_that_a_relative_size_cannot_cut() -> None:
    assert shorten_text(LONG, plan_of("graph", "4x", embedder="tfidf"), may_stay=True).text == LONG
    with pytest.raises(SizeError, match="no unit of the text fits"):
        shorten_text(LONG, plan_of("graph", "50tok", embedder="tfidf"), may_stay=True)


def test_units_of_single_words_join_no_halves() -> None:
    text = kvfold.example_text()
    found = shorten(text, "4x", units="fixed(1)", embedder="tfidf").text
    assert set(found.split()) <= set(text.split())


def test_what_is_kept_brings_its_label() -> None:
    text = "".join(
        f"Document [{n}]: Rain fell on the roof all day. The code is X-{n}2b7 here.\n\n" for n in range(1, 4)
    )
    text += "Anna: It rained. The other code is Y-99c1 here.\n"
    found = shorten(text, "70tok", keep="ids", embedder="tfidf")
    for n in range(1, 4):
        assert f"Document [{n}]: " in found.text and f"X-{n}2b7" in found.text
    assert "Anna: " in found.text and found.num_tokens <= 70


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"text": None}, "text is text, not NoneType"),
        ({"text": b"abc"}, "text is text, not bytes"),
        ({"text": "Hi \ud800 there."}, "text has lone surrogates"),
        ({"to": 4}, 'to is text such as "4x", "25%" or "2000tok", not int'),
        ({"by": "rank", "question": 5}, "question is text, not int"),
        ({"by": "rank", "question": "  "}, "give the question"),
        ({"by": "graph", "question": "Who?"}, "graph reads no question; leave it out, or use rank"),
        ({"tokenizer": "smollm2-135m"}, "tokenizer is one of transformers"),
        ({"model": "smollm2-135m"}, "model is what kvfold.load returns"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        shorten(**{"text": PROSE, **arguments})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"to": "2x, keep=none"}, 'expected one value, found ","'),
        ({"units": "fixed(10), keep=none"}, 'expected one value, found ","'),
        ({"by": "graph(near=1e9)"}, "graph: near takes a whole number, in digits alone; write 1000000000"),
        ({"units": "fixed(-1)"}, "fixed: size is at least 1 token, not -1"),
        ({"by": "graph(near_weight=-5)"}, "near_weight is from 0 to 1, not -5"),
        ({"by": "graph(near_weight=1e17)"}, r"near_weight is from 0 to 1, not 1e\+17"),
        ({"keep": "all,none"}, "all stands alone, and here are 2 kinds"),
        ({"keep": "ALL"}, '"ALL" is written all'),
    ],
)
def test_each_option_is_one_value(options: dict[str, str], told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        plan_of(**{"by": "graph", "to": "4x", **options})


def test_with_a_question_rank_is_the_default() -> None:
    text, question = kvfold.example_text(), "What is the code of the wine cellar?"
    assert (
        kvfold.shorten(text, "8x", question=question).spans
        == kvfold.shorten(text, "8x", "rank", question=question).spans
    )
    assert kvfold.shorten(text, "8x").spans == kvfold.shorten(text, "8x", "graph").spans
