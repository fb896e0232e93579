"""Training of the score `learned`: replay texts with a teacher, train a predictor per layer, evaluate it.

Every fifth text is held out. Training: binary cross-entropy, AdamW, cosine learning rate. A score is between 0 and 1,
and the network's output is its log-odds. Cross-entropy fits the expected score: a slot that is sometimes 1 and
sometimes 0 ranks above one that is always small, which least squares on logs would reverse. Features are standardised
for training; the scales are then folded into the weights.

    H KV heads   N examples   F features   E hidden units   B batch
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.models.pull.progress import Report, silent
from kvfold.plurals import counted
from kvfold.score.predictor import LayerPredictor, Predictor
from kvfold.train.traces import TEACHER, Examples, joined, teacher_weighs, trace

HELD_OUT_EVERY = 5  # texts
_LEAST_SPREAD = 1e-4
_LEAST_SHARE = 1e-6


class Trained(NamedTuple):
    predictor: Predictor
    qualities: list[Quality]  # layer by layer, on held-out texts


def train_scorer(
    model: Model,
    texts: Sequence[Sequence[int]],
    config: TrainingConfig | None = None,
    report: Report = silent,
    *,
    teacher: str = TEACHER,
    surprises: Sequence[Tensor] | None = None,
) -> Trained:
    """A predictor of the scores of `teacher`, a replay score such as kvzip; texts are token ids.

    `surprises` of the texts' tokens, from labels, for a teacher that weighs queries by them (label_surprise.py).
    """
    if surprises is not None and not teacher_weighs(teacher):
        raise InputError(f'"{teacher}" does not weigh tokens, so labels change nothing; use "kvzip(surprise=2)"')
    if len(texts) < 2:
        raise InputError(f"{counted(len(texts), 'text')} cannot be fitted and judged; give at least 2")
    config, found = config or TrainingConfig(), _trace_all(model, texts, teacher, report, surprises)
    held_out = [text for index, text in enumerate(found) if index % HELD_OUT_EVERY == 0]
    fitted_on = [text for index, text in enumerate(found) if index % HELD_OUT_EVERY]
    layers: dict[int, LayerPredictor] = {}
    qualities: list[Quality] = []
    for layer in model.spec.compressible_layers:
        layers[layer] = fit_layer(joined(fitted_on, layer), config, layer)
        qualities.append(evaluate(layers[layer], joined(held_out, layer), layer))
        report("fit layers", len(layers), len(model.spec.compressible_layers))
    return Trained(Predictor(model.weights_digest, layers), qualities)


def _trace_all(
    model: Model, texts: Sequence[Sequence[int]], teacher: str, report: Report, surprises: Sequence[Tensor] | None
) -> list[dict[int, Examples]]:
    runner = Runner(model.hf, model.spec, model.arena, compile=False)
    found = []
    for index, ids in enumerate(texts):
        found.append(trace(runner, ids, teacher, None if surprises is None else surprises[index]))
        report("read texts twice", len(found), len(texts))
    return found


@dataclass(frozen=True)
class TrainingConfig:
    """Hyperparameters; the same seed gives the same weights on one machine."""

    steps: int = 400
    hidden: int = 64
    batch: int = 512
    rate: float = 3e-3
    decay: float = 1e-2
    seed: int = 0


@dataclass(frozen=True)
class Quality:
    """Quality on held-out texts; means over the KV heads of a layer."""

    layer: int
    explained: float  # R^2 of the scores: 1 - squared error / variance
    rank: float  # Spearman's correlation: 1 where both sort slots alike


def fit_layer(examples: Examples, config: TrainingConfig, layer: int) -> LayerPredictor:
    """One network per head of a layer, trained together."""
    x_HNF = examples.x_HNF.float()
    mean_HF, spread_HF = x_HNF.mean(1), x_HNF.std(1).clamp(min=_LEAST_SPREAD)
    x_HNF = (x_HNF - mean_HF.unsqueeze(1)) / spread_HF.unsqueeze(1)
    inner_HFE, bias_HE, outer_HE = _descend(x_HNF, examples.y_HN, config, layer)
    # In the precision of the file, so that evaluation measures the saved weights.
    return LayerPredictor(mean_HF, (inner_HFE / spread_HF.unsqueeze(-1)).half(), bias_HE, outer_HE)


def _descend(x_HNF: Tensor, y_HN: Tensor, config: TrainingConfig, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    num_heads, num_examples, num_features = x_HNF.shape
    draw = torch.Generator().manual_seed(config.seed * 1009 + layer)
    inner_HFE = torch.randn(num_heads, num_features, config.hidden, generator=draw) / math.sqrt(num_features)
    outer_HE = torch.randn(num_heads, config.hidden + 1, generator=draw) / math.sqrt(config.hidden)
    outer_HE[:, -1] = y_HN.mean(1).logit(_LEAST_SHARE).cpu()
    starts = (inner_HFE, torch.zeros(num_heads, config.hidden), outer_HE)
    inner, bias, outer = (start.to(x_HNF.device).requires_grad_() for start in starts)
    descent = torch.optim.AdamW((inner, bias, outer), lr=config.rate, weight_decay=config.decay)
    for step in range(config.steps):
        descent.param_groups[0]["lr"] = config.rate * (1 + math.cos(math.pi * step / config.steps)) / 2
        chosen_B = torch.randint(num_examples, (config.batch,), generator=draw).to(x_HNF.device)
        hidden_HBE = functional.gelu(x_HNF[:, chosen_B] @ inner + bias.unsqueeze(1))
        guess_HB = (hidden_HBE @ outer[:, :-1, None]).squeeze(-1) + outer[:, -1:]
        descent.zero_grad()
        functional.binary_cross_entropy_with_logits(guess_HB, y_HN[:, chosen_B]).backward()
        descent.step()
    return inner.detach(), bias.detach(), outer.detach()


def evaluate(predictor: LayerPredictor, examples: Examples, layer: int) -> Quality:
    """Quality of a predictor on examples."""
    y_HN = examples.y_HN
    guess_HN = predictor(examples.x_HNF.float())
    error_H = (guess_HN.sigmoid() - y_HN).square().mean(1)
    explained_H = 1 - error_H / y_HN.var(1, correction=0)
    return Quality(layer, float(explained_H.mean()), float(spearman(guess_HN, y_HN).mean()))


def spearman(a_HN: Tensor, b_HN: Tensor) -> Tensor:
    """Correlation of ranks, [H]."""
    a, b = (x_HN.argsort(1).argsort(1).double() for x_HN in (a_HN, b_HN))
    a, b = a - a.mean(1, keepdim=True), b - b.mean(1, keepdim=True)
    return torch.cosine_similarity(a, b, dim=1)
