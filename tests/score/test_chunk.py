"""Chunks: means over runs of positions, shared by heads or not, beside slots that always stay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score import Chunk, KeyDiff, Needs, Scorer, SnapKV, View
from tests.score.views import make_view

INF = torch.inf


@dataclass(frozen=True)
class Values(Scorer):
    """The first channel of the values: a score that a test can write down."""

    def score(self, view: View) -> Tensor:
        return view.masked(view.v_RSD[..., 0])


def valued(values: list[list[float]], positions: list[list[int]], lens: tuple[int, int]) -> View:
    """Two heads of one sequence, whose slots score what stands in `values`."""
    view = make_view((lens[0], lens[0]), (lens[0],) * 2 + (lens[1],) * 2, Needs())
    num_slots = len(values[0])
    return replace(
        view,
        k_RSD=view.k_RSD[:2, :num_slots],
        v_RSD=torch.tensor(values).unsqueeze(-1).expand(-1, -1, 8),
        position_RS=torch.tensor(positions),
        valid_RS=torch.arange(num_slots) < torch.tensor(lens).unsqueeze(-1),
        seen_R=torch.tensor([20, 20]),
    )


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvfold.policy import registry

    monkeypatch.setattr(registry, "_terms", dict(registry._terms))
    register("score", "values")(Values)


def test_a_slot_scores_the_mean_of_its_chunk() -> None:
    view = valued([[1, 2, 6, 5, 7], [0, 4, 8, 1, 3]], [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], (5, 5))
    score_RS = Chunk(Values(), size=3, shared=False).score(view)
    assert score_RS.tolist() == [[3, 3, 3, 6, 6], [4, 4, 4, 2, 2]]


def test_heads_share_their_chunks() -> None:
    view = valued([[1, 2, 6, 5, 7], [0, 4, 8, 1, 3]], [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], (5, 5))
    score_RS = Chunk(Values(), size=3).score(view)
    assert score_RS.tolist() == [[3.5, 3.5, 3.5, 4, 4]] * 2


def test_chunks_go_by_position_and_count_stored_slots_only() -> None:
    """Chunks of 10: head 0 holds 9 | 10, 12, 19, head 1 holds 0, 3 | 11 and one slot of padding."""
    view = valued([[2, 3, 6, 9], [4, 9, 2, 99]], [[9, 10, 12, 19], [0, 3, 11, 0]], (4, 3))
    assert Chunk(Values(), shared=False).score(view).tolist() == [[2, 6, 6, 6], [6.5, 6.5, 2, -INF]]
    assert Chunk(Values()).score(view).tolist() == [[5, 5, 5, 5], [5, 5, 5, -INF]]


def test_what_must_stay_stays_alone() -> None:
    view = valued([[1, 3, INF, INF, 7]] * 2, [[0, 1, 2, 3, 4]] * 2, (5, 5))
    assert Chunk(Values(), size=3).score(view)[0].tolist() == [2, 2, INF, INF, 7]


def test_sequences_of_a_batch_do_not_mix() -> None:
    scorer = Chunk(KeyDiff(), size=4)
    view = make_view((30, 30), (30, 30, 30, 30), scorer.needs)
    score_RS = scorer.score(view)
    assert torch.equal(score_RS[0], score_RS[1])
    assert torch.equal(score_RS[2], score_RS[3])
    assert not torch.equal(score_RS[0], score_RS[2])


def test_a_chunk_of_one_token_is_the_inner_score() -> None:
    scorer = Chunk(SnapKV(window=4), size=1, shared=False)
    view = make_view((30,), (30, 20), scorer.needs)
    torch.testing.assert_close(scorer.score(view), SnapKV(window=4).score(view))


@pytest.mark.parametrize(("arguments", "message"), [({"size": 0}, "size must be"), ({"reuse": 0}, "reuse must be")])
def test_bad_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Chunk(**arguments)  # type: ignore[arg-type]
