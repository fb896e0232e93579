"""BM25 by hand, and personalised PageRank from what a question finds."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from kvfold.shortening.base import Task, Unit
from kvfold.shortening.bm25 import bm25
from kvfold.shortening.embedders.hashed import HashedTfIdf
from kvfold.shortening.relevance import relevance
from kvfold.shortening.shorten import shorten_text
from kvfold.shortening.text import plan_of, shorten
from kvfold.shortening.tokens import TokenOffsets
from kvfold.shortening.word_index import WordIndex, words_of

ICE = WordIndex.of(["ice ice ship", "ship", "sun"])


def test_idf_in_thousandths() -> None:
    """ln(1 + (3 - 1 + 0.5) / 1.5) of one unit in three, ln(1 + (3 - 2 + 0.5) / 2.5) of two."""
    assert dict(zip(ICE.vocabulary, ICE.weights().tolist(), strict=True)) == {"ice": 981, "ship": 470, "sun": 981}


def test_bm25_by_hand() -> None:
    """idf · tf · 2.2 / (tf + 1.2 (0.25 + 0.75 · length / mean)); lengths 3, 1, 1 with mean 5/3: 1.92, 0.84, 0.84."""
    assert bm25(ICE, "ice?") == pytest.approx([981 * 2 * 2.2 / (2 + 1.92), 0, 0])
    assert bm25(ICE, "The ship") == pytest.approx([470 * 2.2 / (1 + 1.92), 470 * 2.2 / (1 + 0.84), 0])
    assert bm25(ICE, "Ships, sun and ships") == pytest.approx(bm25(ICE, "ship") + bm25(ICE, "sun"))
    assert bm25(ICE, "rain") == pytest.approx([0, 0, 0])
    assert len(bm25(WordIndex.of([]), "ice")) == 0


def test_words() -> None:
    assert words_of("The Gas-lamps' X-42b7, ÄPFEL") == ["the", "gas", "lamp", "x", "42b7", "äpfel"]
    assert words_of("bus 港口 ですt") == ["bus", "港", "口", "で", "す", "t"]


def task_of(text: str) -> Task:
    """Every line is a unit."""
    starts = [0, *(at + 1 for at, mark in enumerate(text) if mark == "\n")]
    units = tuple(Unit(low, high, "sentence") for low, high in pairwise(starts))
    kept_n = np.zeros(len(units), dtype=bool)
    return Task(text, units, units, kept_n, TokenOffsets.of(text), 1, None, HashedTfIdf())


def test_pagerank_begins_at_what_the_question_finds() -> None:
    """No words in common, all three joined alike: r = 0.3 s + 0.7 (sum - r) / 2, and the start is s = 1 + 1 + 0.001 for
    the unit that BM25 and the cosine find, 0.001 for the others."""
    found = relevance(task_of("alpha beta\ngamma delta\nepsilon zeta\n"), "alpha?")
    expected = [(0.3 * start + 0.35 * 2.003) / 1.35 for start in (2.001, 0.001, 0.001)]
    assert found == pytest.approx(expected, abs=1e-6)


def test_without_a_word_in_common_what_is_central_comes_first() -> None:
    """Of five units in a row the middle one has the most neighbours."""
    found = relevance(task_of("alpha\nbeta\ngamma\ndelta\nepsilon\n"), "Who?")
    assert found.argmax() == 2 and found[:2] == pytest.approx(found[:-3:-1])


def test_what_stands_beside_and_what_is_like_it_comes_next() -> None:
    lines = ["the tide mill is old", "it burned twice", *(f"filler{n} words{n}" for n in range(9)), "old timber stood"]
    found = relevance(task_of("\n".join(lines) + "\n"), "mill?")
    assert found.argmax() == 0 and found[1] > found[5] and found[11] > found[8]


def test_rank_keeps_what_answers_and_what_follows_it() -> None:
    filler = [f"Somebody in village {n} sold {n * 7} sheep to a neighbour." for n in range(30)]
    answer = "The code of the wine cellar was changed. It is now 4711."
    for place in (0, 11, 30):
        text = " ".join([*filler[:place], answer, *filler[place:]])
        found = shorten_text(
            text, plan_of("rank", "30tok", "none", embedder="tfidf"), question="What is the cellar code?"
        )
        assert "The code of the wine cellar was changed. It is now 4711." in found.text


def test_rank_keeps_passages_where_four_may_stay() -> None:
    sentence = "The keeper of house {0} has {0} cats and walks to the harbour before the sun is up. "
    text = "\n\n".join("".join(sentence.format(10 * at + each) for each in range(6)) for at in range(40))
    question = "How many cats has the keeper of house 203?"
    whole, cut = (shorten(text, size, "rank", question=question, keep="none") for size in ("1000tok", "200tok"))
    assert "house 203 " in whole.text and set(_kept_of_paragraphs(whole.text)) == {6}
    assert "house 203 " in cut.text and min(_kept_of_paragraphs(cut.text)) < 6


def _kept_of_paragraphs(text: str) -> list[int]:
    """How many sentences are left of each paragraph that is there."""
    return list(Counter(int(number) // 10 for number in re.findall(r"house (\d+)", text)).values())
