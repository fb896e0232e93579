"""DefensiveKV against a plain formulation, slot by slot and query by query, and on numbers made by hand.

R rows   S slots   D head dim   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.score import Defensive, View
from kvfold.score.attention import window_attention
from tests.score.views import GROUP, HEADS, make_view

LEN, WINDOW, KERNEL, KEEP = 40, 6, 3, 16
BEFORE = LEN - WINDOW
MOST = int(BEFORE * (KEEP / LEN) - WINDOW)  # the authors' q_len is without the window: int(q_len * (1 - ratio) - w)


def the_view() -> View:
    """One sequence, all heads full, sharp attention so that mass gathers on few slots."""
    view = make_view((LEN,), (LEN, LEN), Defensive(window=WINDOW).needs)
    return replace(view, k_RSD=view.k_RSD * 3, slots_per_head=KEEP)


def reference(view: View, mass: float) -> Tensor:
    """[H, slots before the window], written with loops."""
    assert view.q_RGWD is not None and view.q_position_RW is not None and view.wo_HGDM is not None
    weight_HGWS = window_attention(view, view.q_RGWD, view.q_position_RW)[..., :BEFORE]
    bias = float(weight_HGWS[..., -WINDOW:].sum(-1).mean())
    rows = []
    norms = torch.stack([
        torch.stack([(view.v_RSD[h] @ view.wo_HGDM[h, g]).abs().sum(-1) for g in range(GROUP)]).mean(0)
        for h in range(HEADS)
    ])  # fmt: skip
    for h in range(HEADS):
        worst = torch.zeros(BEFORE)
        for g in range(GROUP):
            for w in range(WINDOW):
                worst = torch.maximum(worst, pooled(weight_HGWS[h, g, w]))
        share = norms[h, :BEFORE] / norms[:, :BEFORE].sum(0)
        rows.append(torch.maximum(worst, worst.mean()) * share)
    score_HS = torch.stack(rows)
    top = score_HS.max()
    for h in range(HEADS):
        mean_S = weight_HGWS[h].mean((0, 1))
        for slot in sure_slots(mean_S / mean_S.sum(), mass - bias):
            score_HS[h, slot] = top
    return score_HS


def pooled(weight_S: Tensor) -> Tensor:
    half = KERNEL // 2
    found = torch.stack([weight_S[max(0, j - half) : j + half + 1].sum() / KERNEL for j in range(BEFORE)])
    return found / found.sum() * weight_S.sum()


def sure_slots(share_S: Tensor, wanted: float) -> list[int]:
    found: list[int] = []
    covered = 0.0
    for slot in share_S.argsort(descending=True).tolist():
        covered += float(share_S[slot])
        if covered >= wanted or len(found) == MOST:
            return found
        found.append(slot)
    return found


@pytest.mark.parametrize("mass", [0.0, 0.5, 0.9, 1.0])
def test_scores_are_the_reference(mass: float) -> None:
    view = the_view()
    score_HS = Defensive(WINDOW, KERNEL, mass).score(view)
    torch.testing.assert_close(score_HS[:, :BEFORE], reference(view, mass))
    assert (score_HS[:, BEFORE:] == torch.inf).all()


def test_the_case_is_one_where_every_step_matters() -> None:
    """Mass protects slots, more of it more, the cap is met, and the floor lifts some slots."""
    view = the_view()
    sure = [int((reference(view, mass) == reference(view, mass).max()).sum()) for mass in (0.0, 0.5, 1.0)]
    assert sure[0] == 1 and sure[0] < sure[1] < sure[2] == HEADS * MOST < HEADS * (KEEP - WINDOW)
    scores = Defensive(WINDOW, KERNEL, 0.0).score(view)[:, :BEFORE]
    assert len(scores.unique()) > BEFORE


def test_one_loud_query_outweighs_a_quiet_window() -> None:
    """What one of six queries needs is kept by the worst case and lost by the mean."""
    view = the_view()
    assert view.q_RGWD is not None
    k_RSD, q_RGWD = torch.zeros_like(view.k_RSD), torch.zeros_like(view.q_RGWD)
    q_RGWD[:, 0, 2, 0], q_RGWD[:, :, :, 1] = 30.0, 4.0
    k_RSD[:, 10, 0], k_RSD[:, 20:24, 1] = 1.0, 1.0
    same = replace(view, k_RSD=k_RSD, q_RGWD=q_RGWD, v_RSD=torch.ones_like(view.v_RSD))
    score_S = Defensive(WINDOW, 1, 0.0).score(same)[0, :BEFORE]
    assert int(score_S.argmax()) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must be at least 1"),
        ({"kernel": 2}, "kernel must be odd"),
        ({"mass": 2.0}, "mass is a share of attention"),
    ],
)
def test_bad_arguments(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Defensive(**arguments)
