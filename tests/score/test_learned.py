"""`learned` and its predictor: the formula, the file, and what is refused.

H KV heads   R rows   S slots   D head dim   F features   E hidden units
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvfold.core import ModelSpec, Rope
from kvfold.errors import FileError, KvfoldError, PolicyError
from kvfold.policy import Policy
from kvfold.score import Learned, Needs
from kvfold.score.predictor import (
    FORMAT,
    INT8_FORMAT,
    LayerPredictor,
    Predictor,
    features,
    predictor_for,
    save_predictor,
    shipped_path,
)
from tests.score.views import HEAD_DIM, HEADS, SPEC, make_view

SEEN, LENS = (50, 40), (30, 25, 40, 12)


def random_layer(seed: int = 0, head_dim: int = HEAD_DIM, num_hidden: int = 3) -> LayerPredictor:
    g = torch.Generator().manual_seed(seed)
    shapes = (
        (HEADS, 2 * head_dim),
        (HEADS, 2 * head_dim, num_hidden),
        (HEADS, num_hidden),
        (HEADS, num_hidden + 1),
    )
    return LayerPredictor(*(torch.randn(shape, generator=g) for shape in shapes))


def model_spec(weights: str = "w", num_layers: int = 2) -> ModelSpec:
    dtype = torch.float32
    return ModelSpec("toy", "llama", (SPEC,) * num_layers, dtype, dtype, 100, 10, digest=lambda: weights)


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


def test_a_score_worked_by_hand() -> None:
    """Features (3, 1) less their mean (1, 1): the inner unit sees 2 * 0.5 + 0.1."""
    one = LayerPredictor(*map(torch.tensor, ([[1.0, 1.0]], [[[0.5], [9.0]]], [[0.1]], [[2.0, -4.0]])))
    found = one(torch.tensor([[[3.0, 1.0]]]))
    assert found.item() == pytest.approx(2 * gelu(1.1) - 4)


def test_keys_are_turned_back_to_where_they_stood_before_rope() -> None:
    rope = Rope((1.0, 0.1))
    k_RSD = torch.randn(1, 6, 4, generator=torch.Generator().manual_seed(1))
    position_RS = torch.arange(6).unsqueeze(0) * 7
    x_RSF = features(rope.rotate(k_RSD, position_RS), 2 * k_RSD, position_RS, rope)
    torch.testing.assert_close(x_RSF, torch.cat((k_RSD, 2 * k_RSD), -1), rtol=1e-5, atol=1e-5)


def test_every_head_has_a_network_of_its_own_in_every_sequence() -> None:
    view = make_view(SEEN, LENS, Needs())
    layer = random_layer()
    score_RS = Learned(sinks=0).score(replace(view, predictor=layer))
    x_RSF = features(view.k_RSD, view.v_RSD, view.position_RS, SPEC.rope)
    for row, length in enumerate(LENS):
        head = slice(row % HEADS, row % HEADS + 1)
        alone = LayerPredictor(*(part[head] for part in vars(layer).values()))
        torch.testing.assert_close(score_RS[row, :length], alone(x_RSF[row : row + 1, :length])[0])


def test_many_slots_are_scored_tile_by_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    view = replace(make_view(SEEN, LENS, Needs()), predictor=random_layer())
    whole_RS = Learned().score(view)
    monkeypatch.setattr("kvfold.score.predictor._MAX_ENTRIES", 7 * len(LENS) * 2 * HEAD_DIM)
    torch.testing.assert_close(Learned().score(view), whole_RS)


def test_sinks_stay() -> None:
    view = replace(make_view((20,), (20, 20), Needs()), predictor=random_layer())
    infinite_RS: Tensor = Learned(sinks=3).score(view).isposinf()
    assert infinite_RS.sum(-1).tolist() == [3, 3]
    assert infinite_RS[:, :3].all()


def test_a_file_comes_back_as_it_was_trained(tmp_path: Path) -> None:
    path, layers = tmp_path / "a.safetensors", {0: random_layer(0), 1: random_layer(1)}
    save_predictor(Predictor("w", layers), path)
    found = predictor_for(model_spec(), str(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]
    for index, layer in layers.items():
        for name, part in vars(layer).items():
            kept = part.half() if name == "inner_HFE" else part
            assert getattr(found.at(index, torch.device("cpu")), name).equal(kept), name


def test_a_file_in_int8_is_half_as_large_and_off_by_half_a_step(tmp_path: Path) -> None:
    half, int8 = tmp_path / "half.safetensors", tmp_path / "int8.safetensors"
    layers = {0: random_layer(0, num_hidden=64), 1: random_layer(1, num_hidden=64)}
    layers[1].inner_HFE[0, 3] = 0.0  # a feature that nothing depends on
    for path in (half, int8):
        save_predictor(Predictor("w", layers), path, int8=path == int8)
    found = predictor_for(model_spec(), str(int8)).layers
    for index, layer in layers.items():
        step_HF1 = layer.inner_HFE.abs().amax(-1, keepdim=True) / 127
        assert ((found[index].inner_HFE - layer.inner_HFE).abs() <= 0.501 * step_HF1).all()
        assert found[index].outer_HE.equal(layer.outer_HE)
    assert int8.stat().st_size < 0.75 * half.stat().st_size
    tensors = load_file(int8)
    tensors["0.scale"] = torch.ones(5)
    save_file(tensors, int8, metadata={"kvfold": json.dumps({"format": INT8_FORMAT, "weights": "w"})})
    with pytest.raises(FileError, match="truncated or no scorer"):
        predictor_for(model_spec(), str(int8))


def test_a_file_that_was_trained_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for hidden in (0, 1):
        save_predictor(Predictor("w", {0: random_layer(hidden), 1: random_layer(hidden)}), path)
        found = predictor_for(model_spec(), str(path)).layers[0]
        assert found.mean_HF.equal(random_layer(hidden).mean_HF)


@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_layers_is_refused(tmp_path: Path, layers: int) -> None:
    path = tmp_path / "a.safetensors"
    save_predictor(Predictor("w", {0: random_layer(), 1: random_layer()}), path)
    with pytest.raises(FileError, match="does not fit the layers of toy"):
        predictor_for(model_spec(num_layers=layers), str(path))


def test_foreign_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_predictor(Predictor("w", {0: random_layer(), 1: random_layer()}), path)
    with pytest.raises(FileError, match="trained on other weights than those of toy; train one"):
        predictor_for(model_spec("other"), str(path))


def test_wrong_shapes_and_numbers_are_refused(tmp_path: Path) -> None:
    broken = replace(random_layer(), bias_HE=torch.full((HEADS, 3), torch.nan))
    for number, layer in enumerate((random_layer(head_dim=4), broken)):
        path = tmp_path / f"{number}.safetensors"
        save_predictor(Predictor("w", {0: random_layer(), 1: layer}), path)
        with pytest.raises(FileError, match="does not fit the layers"):
            predictor_for(model_spec(), str(path))


def test_what_is_no_scorer_is_refused(tmp_path: Path) -> None:
    text, foreign, newer = (tmp_path / name for name in ("text", "foreign", "newer"))
    text.write_text("nothing")
    save_file({"a": torch.zeros(1)}, foreign)
    save_file({"a": torch.zeros(1)}, newer, metadata={"kvfold": json.dumps({"format": FORMAT + "0"})})
    reasons = {text: "truncated or no scorer", foreign: "truncated or no scorer", newer: f"this version reads {FORMAT}"}
    for path, reason in reasons.items():
        with pytest.raises(FileError, match=reason):
            predictor_for(model_spec(), str(path))
    with pytest.raises(FileError, match="cannot be read"):
        predictor_for(model_spec(), str(tmp_path / "missing"))


def test_a_model_nothing_was_trained_for_is_refused() -> None:
    for weights in ("", "0" * 64):
        with pytest.raises(PolicyError, match="no predictor for the weights of toy; train one with kvfold"):
            predictor_for(model_spec(weights), "")


def test_what_the_package_has_is_small_and_named_by_the_weights() -> None:
    paths = sorted(shipped_path("").parent.glob("scorer-*.safetensors"))
    assert paths and sum(path.stat().st_size for path in paths) < 2_000_000
    for path in paths:
        with safe_open(path, framework="pt") as file:
            weights = json.loads(file.metadata()["kvfold"])["weights"]
        assert shipped_path(weights) == path
        layers = predictor_for(model_spec(weights), "").layers
        assert all(part.isfinite().all() for layer in layers.values() for part in vars(layer).values())


@pytest.mark.parametrize("file", ["", "a.safetensors", "some where/b-c.safetensors", "a,b(c)+8x.safetensors", "word"])
def test_a_file_is_named_in_quotation_marks(file: str) -> None:
    policy = Policy.parse(f'learned(file="{file}") + global + 8x')
    assert policy.prefill.score == Learned(file)
    assert Policy.parse(str(policy)) == Policy.parse(policy.short) == policy


def test_fingerprints_know_the_content_of_a_file_not_its_name(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "same", "other")]
    for file, content in zip(files, (b"1", b"1", b"2"), strict=True):
        file.write_bytes(content)
    one, same, other = (Policy.parse(f'learned(file="{file}") + 8x').fingerprint for file in files)
    assert one == same != other
    with pytest.raises(PolicyError, match="cannot be read"):
        _ = Policy.parse(f'learned(file="{tmp_path / "none"}") + 8x').fingerprint


def test_a_file_name_that_no_expression_could_hold_is_refused() -> None:
    for file in ('a"b', "a\nb"):
        with pytest.raises(PolicyError, match="quotation marks or line breaks"):
            Learned(file)
    for text in ('learned(file="a) + 8x', 'learned(sinks="4") + 8x', '"learned" + 8x'):
        with pytest.raises(KvfoldError):
            Policy.parse(text)
