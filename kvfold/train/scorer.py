"""Training the score `learned` for a model: read texts twice, fit a predictor for every layer, judge it on other texts.

Every fifth text is kept out of the fit and told apart in what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.models.pull.progress import Report, silent
from kvfold.score.predictor import LayerPredictor, Predictor
from kvfold.train.fit import Fitting, Quality, fit_layer, judge
from kvfold.train.traces import TEACHER, Examples, joined, trace

JUDGED = 5  # every so many texts one is for judging


class Trained(NamedTuple):
    predictor: Predictor
    qualities: list[Quality]  # layer by layer, on texts kept out of the fit


def train_scorer(
    model: Model,
    texts: Sequence[Sequence[int]],
    fitting: Fitting | None = None,
    report: Report = silent,
    *,
    teacher: str = TEACHER,
) -> Trained:
    """A predictor for this model of what `teacher`, a score that reads twice, would find; texts are token ids."""
    if len(texts) < 2:
        raise InputError(f"{len(texts)} texts cannot be fitted and judged; give at least 2")
    fitting, found = fitting or Fitting(), _trace_all(model, texts, teacher, report)
    kept_out = [text for index, text in enumerate(found) if index % JUDGED == 0]
    fitted_on = [text for index, text in enumerate(found) if index % JUDGED]
    layers: dict[int, LayerPredictor] = {}
    qualities: list[Quality] = []
    for layer in model.spec.compressible_layers:
        layers[layer] = fit_layer(joined(fitted_on, layer), fitting, layer)
        qualities.append(judge(layers[layer], joined(kept_out, layer), layer))
        report("fit layers", len(layers), len(model.spec.compressible_layers))
    return Trained(Predictor(model.weights_digest, layers), qualities)


def _trace_all(model: Model, texts: Sequence[Sequence[int]], teacher: str, report: Report) -> list[dict[int, Examples]]:
    runner = Runner(model.hf, model.spec, model.arena, compile=False)
    found = []
    for ids in texts:
        found.append(trace(runner, ids, teacher))
        report("read texts twice", len(found), len(texts))
    return found
