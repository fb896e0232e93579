"""Expected attention: the closed form against sampled queries, and the mean rotation against single ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.core import Rope
from kvfold.errors import PolicyError
from kvfold.score import Expected, QueryStats, View, attention
from kvfold.score.expected import quadratic, rotate_ahead
from tests.score.views import SPEC, make_view

PARTIAL = Rope((1.0, 0.1, 0.01), attention_scale=1.1)  # turns 6 of 8 dims


def view_of(scorer: Expected, rope: Rope | None = PARTIAL) -> View:
    return replace(make_view((40,), (40, 40), scorer.needs), spec=replace(SPEC, rope=rope))


def stats_of(view: View) -> QueryStats:
    assert view.stats is not None
    return view.stats


def rotated(x: Tensor, rope: Rope, position: int) -> Tensor:
    angle = rope.angles(torch.tensor(position))
    return rope.apply(x, angle.cos() * rope.attention_scale, angle.sin() * rope.attention_scale)


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(Expected())
    whole_RS = Expected().score(view)
    monkeypatch.setattr(attention, "MAX_ENTRIES", 40 * 8)  # one row of 40 slots
    torch.testing.assert_close(Expected().score(view), whole_RS)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_mean_rotation_is_the_mean_of_rotations(interleaved: bool) -> None:
    rope = replace(PARTIAL, interleaved=interleaved)
    stats = stats_of(view_of(Expected()))
    matrix_DD = torch.stack([rotated(torch.eye(8), rope, 40 + ahead) for ahead in range(5)]).mean(0).T
    ahead_stats = rotate_ahead(stats, rope, torch.tensor([40, 40]), future=5)
    torch.testing.assert_close(ahead_stats.mean_RGD, stats.mean_RGD @ matrix_DD.T)
    torch.testing.assert_close(ahead_stats.cov_RGDD, matrix_DD @ stats.cov_RGDD @ matrix_DD.T)


def test_dims_without_rotation_are_untouched() -> None:
    stats = stats_of(view_of(Expected()))
    rotated = rotate_ahead(stats, PARTIAL, torch.tensor([40, 40]), future=5)
    assert torch.equal(rotated.mean_RGD[..., 6:], stats.mean_RGD[..., 6:])
    assert torch.equal(rotated.cov_RGDD[..., 6:, 6:], stats.cov_RGDD[..., 6:, 6:])
    assert not torch.equal(rotated.mean_RGD[..., :6], stats.mean_RGD[..., :6])


def test_rows_turn_to_their_own_future() -> None:
    stats = stats_of(view_of(Expected()))
    both = rotate_ahead(stats, PARTIAL, torch.tensor([40, 900]), future=5)
    late = rotate_ahead(stats, PARTIAL, torch.tensor([900, 900]), future=5)
    assert torch.equal(both.mean_RGD[1], late.mean_RGD[1])
    assert not torch.equal(both.mean_RGD[0], late.mean_RGD[0])


def test_quadratic_form() -> None:
    k_RSD, cov_RGDD = torch.randn(2, 5, 8), torch.randn(2, 3, 8, 8)
    by_hand = torch.einsum("rsd,rgde,rse->rgs", k_RSD, cov_RGDD, k_RSD)
    torch.testing.assert_close(quadratic(k_RSD, cov_RGDD), by_hand)


def test_weights_are_those_of_sampled_gaussian_queries() -> None:
    """Without RoPE, value norms and sinks the score is E[exp(q.k * scale)] over its sum: sample it."""
    scorer = Expected(sinks=0, vnorm=False)
    view = view_of(scorer, rope=None)
    stats = stats_of(view)
    torch.manual_seed(0)
    factor_RGDD = torch.linalg.cholesky(stats.cov_RGDD)
    q_RGND = stats.mean_RGD.unsqueeze(2) + torch.randn(2, 3, 200_000, 8) @ factor_RGDD.transpose(-1, -2)
    mass_RGS = (q_RGND @ view.k_RSD.unsqueeze(1).transpose(-1, -2) * SPEC.scale).exp().mean(dim=2)
    sampled_RS = (mass_RGS / mass_RGS.sum(-1, keepdim=True)).mean(dim=1)
    torch.testing.assert_close(scorer.score(view), sampled_RS, rtol=0.1, atol=1e-4)


def test_values_and_epsilon() -> None:
    plain, scaled = Expected(vnorm=False), Expected(epsilon=0.5)
    view = view_of(plain)
    by_hand = (plain.score(view) + 0.5) * view.v_RSD.norm(dim=-1)
    torch.testing.assert_close(scaled.score(view)[:, 4:], by_hand[:, 4:])


def test_sinks_are_kept_and_take_no_part_in_the_softmax() -> None:
    scorer = Expected(sinks=4, vnorm=False)
    score_RS = scorer.score(view_of(scorer))
    assert (score_RS[:, :4] == torch.inf).all()
    torch.testing.assert_close(score_RS[:, 4:].sum(-1), torch.ones(2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sinks": -1}, "sinks must be at least 0"),
        ({"future": 0}, "future must be at least 1"),
        ({"epsilon": -0.1}, "epsilon must be at least 0"),
        ({"epsilon": 0.1, "vnorm": False}, "epsilon only acts with vnorm=true"),
    ],
)
def test_bad_arguments(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Expected(**arguments)  # type: ignore[arg-type]
