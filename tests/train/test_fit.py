"""Training: networks learn what can be learned, scales go into the weights, and quality is told as defined.

H KV heads   N examples   F features
"""

from __future__ import annotations

import pytest
import torch

from kvfold.score.shared.predictor import LayerPredictor
from kvfold.train.scorer import TrainingConfig, evaluate, fit_layer, spearman
from kvfold.train.traces import Examples

FAST = TrainingConfig(steps=400, hidden=16, batch=128)


def examples(seed: int, num_examples: int = 2000) -> Examples:
    """Two heads with different curved log-odds; features far from 0 and of very different spread."""
    x_HNF = torch.randn(2, num_examples, 6, generator=torch.Generator().manual_seed(seed))
    y_HN = torch.stack((x_HNF[0, :, 0] + x_HNF[0, :, 1].abs() - 1, -3 * x_HNF[1, :, 2] - 2)).sigmoid()
    spread_F, level_F = torch.tensor([0.01, 1, 30, 1, 1, 1]), torch.tensor([0, 50, -200, 0, 0, 0])
    return Examples((x_HNF * spread_F + level_F).half(), y_HN)


def test_a_fit_predicts_examples_it_has_not_seen() -> None:
    fitted = evaluate(fit_layer(examples(0), FAST, 0), examples(1), 0)
    started = evaluate(fit_layer(examples(0), TrainingConfig(steps=1, hidden=16, batch=128), 0), examples(1), 0)
    assert fitted.explained > 0.9 and fitted.rank > 0.9
    assert started.explained < 0.5


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = (fit_layer(examples(0), FAST, 3) for _ in range(2))
    other = fit_layer(examples(0), TrainingConfig(steps=200, hidden=16, batch=128, seed=1), 3)
    assert all(a.equal(b) for a, b in zip(vars(first).values(), vars(second).values(), strict=True))
    assert not first.inner_HFE.equal(other.inner_HFE)


def test_all_or_nothing_comes_before_always_little() -> None:
    """Odd examples score .5 or, as often, a millionth, even ones .1: means of .25 and .1, of the logs the reverse."""
    x_HNF = torch.tensor([-1.0, 1.0]).repeat(1000).view(1, 2000, 1).half()
    y_HN = torch.tensor([0.1, 0.5, 0.1, 1e-6]).repeat(500).unsqueeze(0)
    always, sometimes = fit_layer(Examples(x_HNF, y_HN), FAST, 0)(x_HNF[:, :2].float()).sigmoid()[0].tolist()
    assert (always, sometimes) == (pytest.approx(0.1, abs=0.03), pytest.approx(0.25, abs=0.03))


def test_quality_is_that_of_the_definitions() -> None:
    """A predictor that always says log-odds 0, a share of .5: its variance explained is that of the mean, or less."""
    constant = LayerPredictor(torch.zeros(1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1), torch.zeros(1, 2))
    x_HNF = torch.zeros(1, 4, 1).half()
    assert evaluate(constant, Examples(x_HNF, torch.tensor([[0.0, 1.0, 0.0, 1.0]])), 5).explained == pytest.approx(0)
    assert evaluate(constant, Examples(x_HNF, torch.tensor([[0.0, 0.5, 0.0, 0.5]])), 5).explained == pytest.approx(-1)
    assert evaluate(constant, Examples(x_HNF, torch.tensor([[0.0, 0.5, 0.0, 0.5]])), 5).layer == 5


def test_rank_correlation_worked_by_hand() -> None:
    """Ranks 1 2 3 4 5 against 2 1 4 3 5: squared distances sum up to 4, so 1 - 6 * 4 / (5 * 24)."""
    a_HN = torch.tensor([[10.0, 20.0, 30.0, 40.0, 1000.0]])
    b_HN = torch.tensor([[2.0, 1.0, 4.0, 3.0, 5.0]])
    assert spearman(a_HN, b_HN).tolist() == pytest.approx([0.8])
    assert spearman(a_HN, -a_HN).tolist() == pytest.approx([-1])
