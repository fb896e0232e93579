"""Training of the score `learned`: replay texts with a teacher, train a predictor per layer, evaluate it.

Every fifth text is held out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.models.pull.progress import Report, silent
from kvfold.score.shared.predictor import LayerPredictor, Predictor
from kvfold.train.fit import Quality, TrainingConfig, evaluate, fit_layer
from kvfold.train.traces import TEACHER, Examples, joined, trace

HELD_OUT_EVERY = 5  # texts


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
) -> Trained:
    """A predictor of the scores of `teacher`, a replay score such as kvzip; texts are token ids."""
    if len(texts) < 2:
        raise InputError(f"{len(texts)} texts cannot be fitted and judged; give at least 2")
    config, found = config or TrainingConfig(), _trace_all(model, texts, teacher, report)
    held_out = [text for index, text in enumerate(found) if index % HELD_OUT_EVERY == 0]
    fitted_on = [text for index, text in enumerate(found) if index % HELD_OUT_EVERY]
    layers: dict[int, LayerPredictor] = {}
    qualities: list[Quality] = []
    for layer in model.spec.compressible_layers:
        layers[layer] = fit_layer(joined(fitted_on, layer), config, layer)
        qualities.append(evaluate(layers[layer], joined(held_out, layer), layer))
        report("fit layers", len(layers), len(model.spec.compressible_layers))
    return Trained(Predictor(model.weights_digest, layers), qualities)


def _trace_all(model: Model, texts: Sequence[Sequence[int]], teacher: str, report: Report) -> list[dict[int, Examples]]:
    runner = Runner(model.hf, model.spec, model.arena, compile=False)
    found = []
    for ids in texts:
        found.append(trace(runner, ids, teacher))
        report("read texts twice", len(found), len(texts))
    return found
