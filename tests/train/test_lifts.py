"""Measuring lifts of near-zero-size models, and sessions that use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvfold.codec.base import SIDES
from kvfold.codec.lifts import lifted_layers
from kvfold.errors import InputError, ModelError, PolicyError
from kvfold.models.loader import Model
from kvfold.models.watched import watch
from kvfold.session import Session
from kvfold.train.lifts import DAMPING, SINKS, measure_lifts
from tests.tiny import greedy, prompt, ready

TEXTS = [prompt(200, seed=seed) for seed in range(2)]


def test_lifts_are_ridge_regressions_over_all_texts() -> None:
    """Against least squares over all sealed tokens but the first four, with a row for each damped weight."""
    model = ready("llama")
    found = measure_lifts(model, TEXTS)
    assert found.lifts.measured == "2 texts of 200 to 200 tokens" and list(found.lifts.layers) == [1]
    for side in SIDES:
        x_TC, y_TC = (_channels(model, layer, side) for layer in (0, 1))
        width = x_TC.shape[1]
        mean_square = x_TC.square().sum(0).mean()
        x = torch.cat((x_TC, torch.ones(len(x_TC), 1)), 1)
        more = (DAMPING * mean_square).sqrt() * torch.eye(width, width + 1)
        solved = torch.linalg.lstsq(torch.cat((x, more)), torch.cat((y_TC, torch.zeros(width, width)))).solution
        lift = found.lifts.layers[1][side]
        torch.testing.assert_close(lift.weight_CC, solved[:-1], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(lift.bias_C, solved[-1], atol=1e-4, rtol=1e-3)
        left = (y_TC - x @ solved).square().sum() / (y_TC - y_TC.mean(0)).square().sum()
        assert found.told[1][side] == pytest.approx(1 - float(left), abs=1e-4)


def _channels(model: Model, layer: int, side: str) -> Tensor:
    """[T, C] of both texts as the model makes them, keys before RoPE."""
    rope, parts = model.spec.layers[layer].rope, []
    for ids in TEXTS:
        x_HTD = getattr(watch(model.hf, ids)[layer], f"{side}_HTD")
        if side == "k":
            assert rope is not None
            x_HTD = rope.rotate(x_HTD, -torch.arange(len(ids)))
        parts.append(x_HTD[:, SINKS:].transpose(0, 1).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("family", ["llama", "qwen3", "yarn", "gpt_neox"])
def test_exact_rests_answer_token_for_token(family: str, tmp_path: Path) -> None:
    model, path = ready(family), tmp_path / "lifts.safetensors"
    measure_lifts(model, TEXTS[:1]).lifts.write(path)
    ids = prompt(100, seed=7)
    with Session(model, f'aqua("{path}", native, roots=native)', template=None) as session:
        session.extend(ids)
        session.save(tmp_path / "saved")
        assert session.generate(max_new_tokens=40).token_ids == greedy(model.hf, ids, 40)
    with Session.load(model, tmp_path / "saved") as again:
        assert again.generate(max_new_tokens=5).token_ids == greedy(model.hf, ids, 5)


def test_layers_that_do_not_pair_up_have_no_lifts(tmp_path: Path) -> None:
    model = ready("gemma3")
    assert lifted_layers(model.spec) == []
    with pytest.raises(ModelError, match="no two adjacent layers alike that keep everything; aqua cannot serve it"):
        measure_lifts(model, TEXTS[:1])


def test_other_weights_and_short_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lifts.safetensors"
    measure_lifts(ready("llama"), TEXTS[:1]).lifts.write(path)
    with pytest.raises(PolicyError, match="was measured on llama, other weights"):
        Session(ready("llama", seed=5), f'aqua("{path}")')
    for texts in ([], [prompt(127)]):
        with pytest.raises(InputError, match="each of at least 135 tokens"):
            measure_lifts(ready("llama"), texts)
