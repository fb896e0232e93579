"""Measuring heads of a near-zero-size model: needs are shares of attention, and the budget takes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvfold.errors import InputError, PolicyError
from kvfold.models.loader import Model
from kvfold.session import Session
from kvfold.train.profile import key_similarity, measure_heads, measure_layers, needs_of
from tests.tiny import prompt, ready

TEXTS = [prompt(200, seed=seed) for seed in range(2)]


def test_needs_are_those_of_the_texts_and_fall_with_the_loss() -> None:
    model = ready("llama")
    free = model.arena.free_bytes
    both, strict = measure_heads(model, TEXTS), measure_heads(model, TEXTS, loss=0.01)
    alone = [measure_heads(model, [text]) for text in TEXTS]
    assert model.arena.free_bytes == free
    assert [len(layer) for layer in both.needs] == [model.spec.layers[i].num_kv_heads for i in range(3)]
    for place, layer in enumerate(both.needs):
        for head, need in enumerate(layer):
            assert need == pytest.approx(sum(one.needs[place][head] for one in alone) / 2, abs=1e-5)
            assert 0 < need < strict.needs[place][head] <= 1
    assert both.weights == model.weights_digest and "2 texts of 200 to 200 tokens" in both.measured


def test_a_session_takes_a_profile_of_its_own_model_only(tmp_path: Path) -> None:
    model, other = ready("llama"), ready("llama", seed=5)
    path = tmp_path / "heads.json"
    measure_heads(model, TEXTS).write(path)
    policy = f'keydiff + profile(file="{path}") + 2x'
    with Session(model, policy, template=None) as session:
        session.extend(TEXTS[0])
        assert session.stats().mean_slots <= 100
    with pytest.raises(PolicyError, match="other weights"):
        Session(other, policy)


def test_sliding_layers_have_no_needs() -> None:
    assert len(measure_heads(ready("gemma3"), TEXTS[:1]).needs) == 1


def test_short_texts_are_refused() -> None:
    for texts in ([], [prompt(143)]):
        with pytest.raises(InputError, match="each of at least 144 tokens"):
            measure_heads(ready("llama"), texts)


TEXT = prompt(400)


def test_keys_of_the_first_layer_do_not_change_and_of_the_last_most(model: Model) -> None:
    first, second, third = key_similarity(model, TEXT)
    assert first == pytest.approx(1.0, abs=1e-5) and first > second > third
    profile = measure_layers(model, [TEXT, prompt(360, seed=2)])
    assert [len(set(layer)) for layer in profile.needs] == [1, 1, 1]  # heads of a layer alike
    assert profile.needs[0] == (0.0, 0.0) and profile.needs[2] == (1.0, 1.0) and 0 < profile.needs[1][0] < 1
    assert profile.weights == model.weights_digest and "2 texts of 360 to 400 tokens" in profile.measured


def test_similarity_is_that_of_the_models_own_keys_under_a_mask(model: Model) -> None:
    """A window of 100 slots, 32 of them for new tokens: a block sees sinks and 64 tokens before it, or all of 100."""
    window, block, sinks = 100, 50, 4
    place_T = torch.arange(len(TEXT))
    start_T = place_T // block * block
    seen_T = torch.where(start_T > window, start_T - (window - 32 - sinks), 0)
    sees_TT = (place_T < sinks) | (place_T >= seen_T.unsqueeze(-1))
    keys = [_keys(model, mask_TT & (place_T <= place_T.unsqueeze(-1))) for mask_TT in (sees_TT, sees_TT | True)]
    expected = [float(torch.cosine_similarity(a, b, dim=-1).mean()) for a, b in zip(*keys, strict=True)]
    assert key_similarity(model, TEXT) == pytest.approx(expected, abs=1e-4)


@torch.inference_mode()
def _keys(model: Model, mask_TT: torch.Tensor) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.k_proj.register_forward_hook(lambda *call: found.append(call[2][0].unflatten(-1, (2, -1))))
        for layer in model.hf.model.layers
    ]
    model.hf.set_attn_implementation("sdpa")
    model.hf(torch.tensor([TEXT]), attention_mask=mask_TT[None, None], use_cache=False)
    model.hf.set_attn_implementation("kvfold")
    for hook in hooks:
        hook.remove()
    return found


def test_layers_that_a_cut_does_not_reach_stay_alike() -> None:
    """The one full layer of this model stands on one with a window."""
    assert measure_layers(ready("gemma3"), [TEXT]).needs == ((1.0, 1.0),)


def test_needs_by_hand() -> None:
    assert needs_of([1.0, 0.8, 0.6]) == [0.0, round(0.5**1.1, 6), 1.0]
    assert needs_of([0.7, 0.7]) == [1.0, 1.0]


def test_texts_too_short_for_a_window_are_refused(model: Model) -> None:
    for texts in ([], [prompt(319)]):
        with pytest.raises(InputError, match="each of at least 320 tokens"):
            measure_layers(model, texts)
