"""The graph of units by hand: PageRank, mutual neighbours, repeats; and what `graph` keeps."""

from __future__ import annotations

import numpy as np
import pytest

from kvfold.shortening.clusters import clusters
from kvfold.shortening.embedders.codes import SCALE, encode_unit
from kvfold.shortening.embedders.hashed import HashedTfIdf
from kvfold.shortening.sentence_graph import SEGMENT, SentenceGraph, segments
from kvfold.shortening.shorten import shorten_text
from kvfold.shortening.text import plan_of

APART = encode_unit(np.eye(3))
CLOSE = encode_unit(np.array([[1.0, 0.0, 0.0], [0.6, 0.8, 0.0], [0.0, 0.0, 1.0]]))


def edges(graph: SentenceGraph) -> dict[tuple[int, int], float]:
    found = zip(graph.source_E.tolist(), graph.target_E.tolist(), graph.weight_E.tolist(), strict=True)
    return {(source, target): weight for source, target, weight in found}


def at_degrees(*angles: float) -> np.ndarray:
    turned = np.radians(angles)
    return encode_unit(np.stack([np.cos(turned), np.sin(turned)], axis=1))


def test_units_that_stand_near_are_joined() -> None:
    assert edges(SentenceGraph.of(APART, near=1)) == {(0, 1): 0.3, (1, 0): 0.3, (1, 2): 0.3, (2, 1): 0.3}
    assert set(edges(SentenceGraph.of(APART, near=2))) == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert edges(SentenceGraph.of(APART, near=0)) == {}


def test_pagerank_of_a_path() -> None:
    """0 - 1 - 2 at damping 1/2: a = 1/2 + b/4 at the ends, b = 1/2 + a in the middle, and 2a + b = 3."""
    path = SentenceGraph.of(APART, near=1)
    assert path.rank(np.ones(3), 0.5) == pytest.approx([5 / 6, 4 / 3, 5 / 6], abs=1e-9)


def test_personalised_pagerank_of_a_path() -> None:
    """All begins at 0: a = 1/2 + b/4, b = (a + c)/2, c = b/4."""
    path = SentenceGraph.of(APART, near=1)
    assert path.rank(np.array([1.0, 0.0, 0.0]), 0.5) == pytest.approx([7 / 12, 1 / 3, 1 / 12], abs=1e-9)


def test_a_unit_without_an_edge_begins_again() -> None:
    """0 and 1 are joined, 2 is not: c = 1/2 + (c/3)/2 is 0.6, a = b = 0.6 + a/2."""
    graph = SentenceGraph.of(CLOSE, near=0)
    assert edges(graph) == pytest.approx({(0, 1): 0.36, (1, 0): 0.36}, abs=0.01)
    assert graph.rank(np.ones(3), 0.5) == pytest.approx([1.2, 1.2, 0.6], abs=1e-9)


def test_heavier_edges_carry_more() -> None:
    graph = SentenceGraph(3, np.array([0, 0, 1, 2]), np.array([1, 2, 0, 0]), np.array([3.0, 1.0, 3.0, 1.0]))
    found = graph.rank(np.ones(3), 0.5)  # a = 1/2 + (b + c)/2 and b + c = 3 - a; b and c get 3/4 and 1/4 of a/2
    assert found == pytest.approx([4 / 3, 1.0, 2 / 3], abs=1e-9)


def test_neighbours_are_mutual() -> None:
    """2 is nearest to 1, and 1 to 0: with one neighbour each, 2 is left out."""
    codes = at_degrees(0, 25, 60)
    assert set(edges(SentenceGraph.of(codes, neighbours=1, near=0))) == {(0, 1), (1, 0)}
    both = edges(SentenceGraph.of(codes, neighbours=2, near=0))
    assert both[0, 1] == pytest.approx(np.cos(np.radians(25)) ** 2, abs=0.02)
    assert len(both) == 6 and both[0, 2] == both[2, 0] < both[1, 2] < both[0, 1]


def test_of_two_as_near_the_earlier_is_the_neighbour() -> None:
    codes = at_degrees(60, 0, 60.0)[[1, 0, 2]]  # 1 and 2 are alike, so they pass nothing to each other
    assert set(edges(SentenceGraph.of(codes, neighbours=1, near=0))) == {(0, 1), (1, 0)}


def test_opposites_and_twins_are_not_joined() -> None:
    assert edges(SentenceGraph.of(at_degrees(0, 180), near=0)) == {}
    assert edges(SentenceGraph.of(at_degrees(10, 10), near=0)) == {}


@pytest.mark.parametrize("number", (0, 1))
def test_graphs_of_few_units(number: int) -> None:
    graph = SentenceGraph.of(APART[:number])
    assert edges(graph) == {} and graph.rank(np.ones(number), 0.85).tolist() == [1.0] * number


def test_segments_are_of_nearly_equal_length() -> None:
    assert segments(0) == [(0, 0)] and segments(SEGMENT) == [(0, SEGMENT)]
    for number in (SEGMENT + 1, 5 * SEGMENT - 3, 50_000):
        found = segments(number)
        lengths = [high - low for low, high in found]
        assert found[0][0] == 0 and found[-1][1] == number and max(lengths) - min(lengths) <= 1
        assert max(lengths) <= SEGMENT and sum(length**2 for length in lengths) <= number * SEGMENT


def test_clusters_of_two_directions() -> None:
    label, centres = clusters(at_degrees(0, 4, 90, 86), 2)
    assert label[0] == label[1] != label[2] == label[3]
    assert centres[label[0]].tolist() == at_degrees(2).tolist()[0]
    label, centres = clusters(APART, 1)
    assert label.tolist() == [0, 0, 0] and centres.tolist() == [[round(SCALE / 3**0.5)] * 3]


HUB = "Grain, wool and salt came by ship to the harbour town. "
SPOKES = (
    "Farmers of the valley sold their grain to merchants. ",
    "Shepherds from distant mountains brought wool each autumn. ",
    "Workers near marshes boiled brine until white salt remained. ",
)
ASIDE = "Meanwhile somebody elsewhere painted a purple elephant. "


@pytest.mark.parametrize("place", range(5))
def test_the_sentence_that_shares_words_with_all_others_is_central(place: int) -> None:
    sentences = [*SPOKES, ASIDE]
    sentences.insert(place, HUB)
    rank_n = SentenceGraph.of(HashedTfIdf().codes(sentences), near=0).rank(np.ones(5), 0.85)
    assert rank_n.argmax() == place and rank_n.argmin() == sentences.index(ASIDE)


def test_what_is_repeated_stays_once() -> None:
    text = (HUB + ASIDE) * 3 + "".join(SPOKES)
    found = shorten_text(text, plan_of("graph", "55tok", "none", embedder="tfidf")).text
    assert found.count(HUB) == found.count(ASIDE) == 1
