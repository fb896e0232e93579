"""Measuring bases of near-zero-size models, and sessions that use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.codec.base import SIDES
from kvfold.errors import InputError, PolicyError
from kvfold.models.pass_cache import kv_gradients
from kvfold.session import Session
from kvfold.train.bases import measure_bases
from tests.tiny import greedy, prompt, ready

TEXTS = [prompt(200, seed=seed) for seed in range(2)]


def test_axes_and_worth_are_those_of_the_texts() -> None:
    """Against one covariance of all tokens: its eigenvectors, and its eigenvalues times the mean squared gradient."""
    model = ready("llama")
    bases, layer = measure_bases(model, TEXTS), 1
    rope = model.spec.layers[layer].rope
    assert rope is not None and (bases.num_heads, bases.measured) == (2, "2 texts of 200 to 200 tokens")
    found = [kv_gradients(model.hf, ids)[layer] for ids in TEXTS]
    back_T = -torch.arange(200)
    k_TX = torch.cat([rope.rotate(text.k_HTD, back_T).transpose(0, 1).flatten(1) for text in found])
    v_TX = torch.cat([text.v_HTD.transpose(0, 1).flatten(1) for text in found])
    gradients = [torch.cat([getattr(text, name) for text in found], 1) for name in ("by_k_HTD", "by_v_HTD")]
    for side, x_TX, by_HTD in zip(SIDES, (k_TX, v_TX), gradients, strict=True):
        basis = bases.layers[layer][side]
        torch.testing.assert_close(basis.mean_GX[0], x_TX.mean(0), atol=1e-5, rtol=1e-4)
        variance_X = (x_TX - x_TX.mean(0)) @ basis.axes_GXX[0]
        expected = variance_X.square().mean(0) * by_HTD.square().mean()
        torch.testing.assert_close(basis.worth_GX[0], expected, atol=1e-6, rtol=1e-3)
        assert (basis.worth_GX.diff() <= 0).all()


@pytest.mark.parametrize(("family", "most", "size"), [("llama", 4, 2), ("llama", 1, 1), ("gpt_neox", 3, 2)])
def test_heads_go_together_as_they_divide(family: str, most: int, size: int) -> None:
    assert measure_bases(ready(family), TEXTS[:1], most).num_heads == size


def test_sliding_layers_have_no_bases() -> None:
    assert list(measure_bases(ready("gemma3"), TEXTS[:1]).layers) == [1]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "yarn", "gpt_neox"])
def test_the_whole_rank_answers_token_for_token(family: str, tmp_path: Path) -> None:
    model, path = ready(family), tmp_path / "bases.safetensors"
    measure_bases(model, TEXTS[:1]).write(path)
    ids = prompt(100, seed=7)
    with Session(model, f'palu("{path}", rank=1)', template=None) as session:
        session.extend(ids)
        session.save(tmp_path / "saved")
        assert session.generate(max_new_tokens=40).token_ids == greedy(model.hf, ids, 40)
    with Session.load(model, tmp_path / "saved") as again:
        assert again.generate(max_new_tokens=5).token_ids == greedy(model.hf, ids, 5)


def test_the_measured_axes_lose_less_than_others() -> None:
    """Half of the channels that vary most, against half of those that vary least."""
    model = ready("llama")
    basis = measure_bases(model, TEXTS).layers[1]["v"]
    v_TX = kv_gradients(model.hf, prompt(150, seed=5))[1].v_HTD.transpose(0, 1).flatten(1) - basis.mean_GX
    errors = []
    for axes_XX in (basis.axes_GXX[0], basis.axes_GXX[0].flip(-1)):
        kept = axes_XX[:, :16]
        errors.append(float((v_TX - v_TX @ kept @ kept.mT).norm()))
    assert errors[0] < 0.8 * errors[1]


def test_other_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bases.safetensors"
    measure_bases(ready("llama"), TEXTS[:1]).write(path)
    with pytest.raises(PolicyError, match="was measured on llama, other weights"):
        Session(ready("llama", seed=5), f'palu("{path}")')


def test_short_texts_are_refused() -> None:
    for texts in ([], [prompt(127)]):
        with pytest.raises(InputError, match="each of at least 135 tokens"):
            measure_bases(ready("llama"), texts)
