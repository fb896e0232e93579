"""Choosing the top slots, and counting them over heads and layers, against plain Python.

H heads   S slots
"""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.budget.select import count_top, select_same, select_top
from tests.budget.scores import layers_of_scores, scores


def plain_choose(row: list[float], count: int) -> list[bool]:
    order = sorted((i for i, score in enumerate(row) if score > -torch.inf), key=lambda i: (-row[i], i))
    return [i in order[:count] for i in range(len(row))]


@settings(deadline=None)
@given(scores(), st.lists(st.integers(0, 12), min_size=4, max_size=4))
def test_choose_equals_sorting_each_row(score_HS: Tensor, counts: list[int]) -> None:
    count_H = torch.tensor(counts[: score_HS.shape[0]])
    plain = [plain_choose(row, count) for row, count in zip(score_HS.tolist(), counts, strict=False)]
    assert select_top(score_HS, count_H).tolist() == plain


@settings(deadline=None)
@given(scores(), st.integers(0, 12))
def test_one_count_for_all_heads_needs_no_sort(score_HS: Tensor, count: int) -> None:
    plain = [plain_choose(row, count) for row in score_HS.tolist()]
    assert select_same(score_HS, count).tolist() == plain


def test_ties_go_to_the_lower_index() -> None:
    score_HS = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert select_top(score_HS, torch.tensor([2, 3])).tolist() == [
        [False, True, True, False],
        [True, True, True, False],
    ]


def test_ties_go_to_the_lower_index_in_long_rows() -> None:
    """Sorts that are stable on a few values need not be on many."""
    kept_HS = select_top(torch.zeros(2, 5000), torch.tensor([1234, 0]))
    assert kept_HS[0, :1234].all() and not kept_HS[0, 1234:].any() and not kept_HS[1].any()


def test_padding_is_never_chosen() -> None:
    score_HS = torch.tensor([[1.0, -torch.inf, torch.inf]])
    assert select_top(score_HS, torch.tensor([3])).tolist() == [[True, False, True]]


def test_a_score_that_is_no_number_is_never_chosen() -> None:
    score_HS = torch.tensor([[torch.nan, 1.0, torch.inf, 0.0]])
    assert select_top(score_HS, torch.tensor([2])).tolist() == [[False, True, True, False]]
    assert count_top([score_HS], 2)[0].tolist() == [2]


def test_the_top_of_an_additive_score_is_the_best_of_all_subsets() -> None:
    weight_S = torch.rand(9, generator=torch.Generator().manual_seed(0))
    for count in range(10):
        best = max(sum(subset) for subset in combinations(weight_S.tolist(), count))
        kept_S = select_top(weight_S.unsqueeze(0), torch.tensor([count]))[0]
        assert abs(float(weight_S[kept_S].sum()) - best) < 1e-5


def test_rates_of_heads_average_harmonically() -> None:
    """Heads at 8x, 2x, 16x and 4x keep 4.2667x less together."""
    rates = torch.tensor([8, 2, 16, 4])
    kept_HS = select_top(torch.rand(4, 160), 160 // rates)
    assert abs(kept_HS.numel() / int(kept_HS.sum()) - 4.2667) < 5e-5


@settings(deadline=None)
@given(layers_of_scores(), st.integers(0, 60))
def test_count_top_equals_sorting_everything(scores: list[Tensor], total: int) -> None:
    flat = [
        (-score, layer, head)
        for layer, score_HS in enumerate(scores)
        for head, row in enumerate(score_HS.tolist())
        for score in row
        if score > -torch.inf
    ]
    must_stay = sum(score == -torch.inf for score, *_ in flat)
    top = sorted(flat)[: max(total, must_stay)]  # equal scores: earlier layer, then earlier head
    plain = [
        [sum(item[1:] == (layer, head) for item in top) for head in range(len(s))] for layer, s in enumerate(scores)
    ]
    assert [count_H.tolist() for count_H in count_top(scores, total)] == plain


def test_what_is_no_number_takes_no_slot_from_others() -> None:
    score_HS = torch.tensor([[torch.nan, 1.0, torch.inf, 0.0], [2.0, torch.nan, torch.nan, -1.0]])
    (count_H,) = count_top([score_HS], 4)
    assert count_H.tolist() == [3, 1]
    assert select_top(score_HS, count_H).sum(-1).tolist() == [3, 1]
    (all_H,) = count_top([score_HS], 8)
    assert all_H.tolist() == [3, 2]
