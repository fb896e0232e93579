"""Measuring heads of a near-zero-size model: needs are shares of attention, and the budget takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.errors import InputError, PolicyError
from kvfold.session import Session
from kvfold.train.profile import measure_heads
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
