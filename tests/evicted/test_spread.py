"""`cam` and `d2o`: against plain loops over slots, and worked by hand.

N slots of one head   K kept   D head dim
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.budget.scores import Scores
from kvfold.errors import PolicyError
from kvfold.evicted import Cam, D2o, Drop, Split
from kvfold.pages.read import stored_slots
from kvfold.pages.rewrite import LayerChange
from kvfold.pages.staged import Numbers, Staged
from kvfold.policy import Policy
from tests.evicted.test_merge import split_of
from tests.pages.tiny import new_sequence, prefill, random_layers, tiny_spec


def d2o_by_loop(split: Split) -> tuple[torch.Tensor, torch.Tensor]:
    kept = [i for i, keep in enumerate(split.keep_N.tolist()) if keep]
    found = []
    for i in range(len(split.keep_N)):
        if not split.keep_N[i]:
            cosines = [float(torch.cosine_similarity(split.k_ND[i], split.k_ND[j], dim=0)) for j in kept]
            found.append((max(cosines), kept[cosines.index(max(cosines))], i))
    mean = sum(cosine for cosine, _, _ in found) / max(len(found), 1)
    rows = []
    for j in kept:
        mine = [(cosine, i) for cosine, near, i in found if near == j and cosine >= mean - 1e-6]
        k, v = (sum((c * x[i] for c, i in mine), start=x[j]) / (1 + len(mine)) for x in (split.k_ND, split.v_ND))
        rows.append((k, v))
    return torch.stack([k for k, _ in rows]), torch.stack([v for _, v in rows])


@settings(max_examples=60, deadline=None)
@given(num_slots=st.integers(1, 12), data=st.data(), seed=st.integers(0, 1 << 30))
def test_d2o_is_the_loop(num_slots: int, data: st.DataObject, seed: int) -> None:
    keep = data.draw(st.lists(st.integers(0, num_slots - 1), min_size=1, unique=True))
    split = split_of(num_slots, keep, seed=seed)
    for found, expected in zip(D2o().fold(split), d2o_by_loop(split), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_worked_d2o() -> None:
    """Cosines 1 and 0.6, mean 0.8: slot 1 goes into slot 0, halfway; slot 2 is dropped."""
    k_ND = torch.tensor([[2.0, 0.0], [5.0, 0.0], [-0.8, 0.6], [0.0, 1.0]])
    v_ND = torch.tensor([[1.0, 0.0], [0.0, 3.0], [2.0, 0.0], [0.0, 2.0]])
    k_KD, v_KD = D2o().fold(Split(k_ND, v_ND, torch.arange(4), torch.tensor([True, False, False, True])))
    torch.testing.assert_close(k_KD, torch.tensor([[3.5, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(v_KD, torch.tensor([[0.5, 1.5], [0.0, 2.0]]))


def certain(keep: list[int], num_slots: int = 6) -> Split:
    """Every evicted slot has more attention than the kept ones on average, so chance has no say."""
    split = split_of(num_slots, keep)
    split.score_N = torch.where(split.keep_N, 1.0, 2.0)
    return split


def test_cam_adds_a_value_to_the_slots_that_follow() -> None:
    """Slot 1 goes to 2 and 3, slot 4 to 5 alone: two shares each, of which one finds no slot."""
    split = certain([0, 2, 3, 5])
    v = split.v_ND
    k_KD, v_KD = Cam(spread=2).fold(split)
    expected = torch.stack([v[0], v[2] + v[1] / 2, v[3] + v[1] / 2, v[5] + v[4] / 2])
    assert k_KD.equal(split.k_ND[[0, 2, 3, 5]])
    torch.testing.assert_close(v_KD, expected)


def test_cam_merges_as_often_as_attention_says() -> None:
    """Half the attention of the kept: about half of 4000 evicted slots, others with another seed; none: none."""
    split = split_of(4001, [4000], head_dim=1)
    split.v_ND.fill_(1.0)
    split.score_N = torch.where(split.keep_N, 1.0, 0.5)
    counts = [float(Cam(spread=1, seed=seed).fold(split)[1]) - 1 for seed in (0, 1)]
    assert all(abs(count - 2000) < 150 for count in counts) and counts[0] != counts[1]
    split.score_N[:4000] = 0.0
    assert float(Cam(spread=1).fold(split)[1]) == 1.0


def test_slots_that_had_to_stay_are_no_measure() -> None:
    split = split_of(3, [0, 2], head_dim=1)
    split.v_ND.fill_(1.0)
    split.score_N = torch.tensor([torch.inf, 1.0, 1.0])
    assert Cam(spread=1).fold(split)[1].flatten().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("way", [Cam(), D2o()])
@pytest.mark.parametrize("side", ["k_ND", "v_ND"])
def test_a_broken_evicted_slot_is_dropped(way: Cam | D2o, side: str) -> None:
    split = certain([0, 1, 9], 10)
    getattr(split, side)[5, 0] = torch.nan
    assert all(x.isfinite().all() for x in way.fold(split))


class Noting(Drop):
    """Drops, and notes what it was shown."""

    changes = True

    def __init__(self) -> None:
        self.splits: list[Split] = []

    def fold(self, split: Split) -> tuple[torch.Tensor, torch.Tensor]:
        self.splits.append(split)
        return super().fold(split)


def test_scores_reach_the_fold() -> None:
    """Two heads with two and no stored slots and three new ones each: new slots come with their own scores."""
    score_HS = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5], [0.6, 0.7, 0.8, -torch.inf, -torch.inf]])
    x_ND = torch.arange(6.0).unsqueeze(-1)
    change = LayerChange(x_ND, x_ND, torch.arange(6), [3, 3])
    scores, way = Scores(score_HS), Noting()
    Staged(scores, [2, 0], change, scores).trim(torch.tensor([2, 3]), Numbers([2, 3], [0, 0], [2, 3], [0, 0]), way)
    first, second = (split.score_N for split in way.splits)
    assert first is not None and second is not None
    assert (first.tolist(), second.tolist()) == (score_HS[0, 2:].tolist(), score_HS[1, :3].tolist())


def test_a_round_with_cam_keeps_other_values() -> None:
    spec = tiny_spec()
    layers = random_layers(spec, 60)
    policy = "snapkv(window=4) + 40tok + protect(sinks=1, recent=4)"
    plain, merged = (new_sequence(f"{policy}{more}", spec) for more in ("", " + cam(spread=4)"))
    for sequence in (plain, merged):
        prefill(sequence, layers)
    before, after = (stored_slots(sequence, 0, torch.float32) for sequence in (plain, merged))
    assert before.k[0].equal(after.k[0]) and not before.v[0].equal(after.v[0])


def test_a_score_without_attention_is_refused() -> None:
    with pytest.raises(PolicyError, match="cam compares the attention that slots received, and score keydiff"):
        Policy.parse("keydiff + 8x + cam")
    Policy.parse("h2o + 8x + cam")
    Policy.parse("keydiff + 8x + d2o")
