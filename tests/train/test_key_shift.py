"""Keys in a window against keys of the whole text: what depends on nothing far away needs nothing."""

from __future__ import annotations

import pytest
import torch

from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.train.profile import key_similarity, measure_layers, needs_of
from tests.tiny import prompt, ready

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


def test_short_texts_are_refused(model: Model) -> None:
    for texts in ([], [prompt(319)]):
        with pytest.raises(InputError, match="each of at least 320 tokens"):
            measure_layers(model, texts)
