"""Texts by their words: weights worked by hand, clusters of plain cases, the nearest one to a question.

N pieces   W words
"""

from __future__ import annotations

import math

import pytest
import torch

from kvfold.tfidf import Topics, Vocabulary

PIECES = [
    "the boat left the harbour",
    "the bread needs flour and salt",
    "a boat in the harbour needs a sail",
    "flour, salt and water make bread",
    "the sail of the boat is red",
    "bread with salt",
]


def test_weights_are_tf_idf() -> None:
    """Two pieces; `b` stands in both, so it counts 1; `a` in one, so ln(3 / 2) + 1, twice."""
    words = Vocabulary.of(["a b A", "b"])
    a = 2 * (math.log(3 / 2) + 1)
    found = words.vectors(["a b A", "b", "unknown"])
    expected = torch.tensor([[a, 1.0], [0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(found, expected / torch.tensor([[math.hypot(a, 1)], [1.0], [1.0]], dtype=torch.float64))


def test_pieces_about_one_thing_stand_together() -> None:
    topics = Topics.of(PIECES, 2)
    boats, bread = topics.label_N[0], topics.label_N[1]
    assert boats != bread
    assert topics.label_N.tolist() == [boats, bread] * 3


@pytest.mark.parametrize(("text", "like"), [("Where is the harbour?", 0), ("How much FLOUR?", 1), ("red sail", 4)])
def test_a_question_goes_where_its_words_are(text: str, like: int) -> None:
    topics = Topics.of(PIECES, 2)
    assert topics.nearest(text) == topics.label_N[like]


def test_a_question_of_strange_words_goes_to_the_largest() -> None:
    topics = Topics.of([*PIECES, "salt and flour"], 2)
    assert topics.nearest("xyzzy") == topics.label_N[1]


def test_medoids_are_the_nearest_to_the_centre_in_order() -> None:
    topics = Topics.of(PIECES, 2)
    mine = [1, 3, 5]
    near = {i: float(topics.text_NW[i] @ topics.centre_EW[topics.label_N[1]]) for i in mine}
    best = sorted(sorted(mine, key=lambda i: -near[i])[:2])
    assert topics.medoids(int(topics.label_N[1]), 2) == best
    assert topics.medoids(int(topics.label_N[1]), 9) == mine


def test_there_are_no_more_clusters_than_different_pieces() -> None:
    assert Topics.of(["one two", "one two", "three"], 5).count == 2
    assert Topics.of(["one"], 4).count == 1
