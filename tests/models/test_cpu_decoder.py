"""A decode step whose layers run in one call gives the bits of one that goes layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvfold.core import HAS_AVX512_KERNELS
from kvfold.engine.runner import Runner
from kvfold.models.cpu_decoder import Decoder
from kvfold.models.loader import Model, wrap
from kvfold.passes.decode import DecodePass
from kvfold.policy.policy import Policy
from tests.tiny import prompt, ready

pytestmark = pytest.mark.skipif(not HAS_AVX512_KERNELS, reason="kernels for AVX-512")
CODED = "knorm + 2x + protect(sinks=1, recent=2) + int4"
STEPS = 40  # more than an open block holds


@pytest.fixture
def num_whole(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every step that ran in one call."""
    found, run = [], Decoder.run

    def counted(self: Decoder, hidden_1NM: Tensor, *args: Any) -> Tensor:
        found.append(hidden_1NM.shape[1])
        return run(self, hidden_1NM, *args)

    monkeypatch.setattr(Decoder, "run", counted)
    return found


def replies(model: Model, policies: Sequence[str], steps: int = STEPS) -> Tensor:
    runner = Runner(model.hf, model.spec, model.arena)
    sequences = [runner.new_sequence(Policy.parse(policy)) for policy in policies]
    found = [runner.prefill(sequences, [prompt(20 + 3 * i) for i in range(len(policies))])]
    for _ in range(steps):
        found.append(runner.decode(sequences, found[-1].argmax(-1).tolist()))
    for sequence in sequences:
        sequence.release()
    return torch.stack(found)


def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecodePass, "all_layers", lambda _: None)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_bits_are_those_of_layer_by_layer(
    family: str, kv_dtype: torch.dtype, num_threads: int, num_whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ready(family)
    model = wrap(shared.hf, shared.tokenizer, kv_dtype=kv_dtype)
    before, policies = torch.get_num_threads(), ["full", CODED, "full", "full + int2"] * 5
    torch.set_num_threads(num_threads)
    try:
        found = replies(model, policies)
        assert num_whole == [len(policies)] * STEPS
        layer_by_layer(monkeypatch)
        assert torch.equal(found, replies(model, policies))
    finally:
        torch.set_num_threads(before)
    assert len(num_whole) == STEPS


@pytest.mark.parametrize("policies", [["full", "h2o + 2x"], ["full", "full + kivi4"]], ids=["observed", "in torch"])
def test_what_kernels_cannot_do_goes_layer_by_layer(policies: list[str], num_whole: list[int]) -> None:
    replies(ready("llama"), policies, 2)
    assert num_whole == []


def test_layers_past_their_window_and_shared_prefixes_go_layer_by_layer(
    num_whole: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forks(family: str) -> Tensor:
        """Two replies to one prompt, of which the first slots are stored once."""
        model = ready(family)
        runner = Runner(model.hf, model.spec, model.arena)
        first = runner.new_sequence(Policy.parse("full"))
        runner.prefill([first], [prompt(20)])
        both = [first, first.fork()]
        found = torch.stack([runner.decode(both, [step, step + 1]) for step in range(6)])
        for sequence in both:
            sequence.release()
        return found

    shared = forks("mistral")
    assert num_whole == []
    sliding = replies(ready("mistral_sliding"), ["full"] * 2, 6)  # prompts of 20 and 23 tokens, a window of 24
    assert num_whole == [2]
    monkeypatch.setattr("kvfold.models.cpu_linear.is_wanted", lambda: False)
    torch.testing.assert_close(shared, forks("mistral"), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sliding, replies(ready("mistral_sliding"), ["full"] * 2, 6), rtol=1e-4, atol=1e-4)


def test_a_layer_that_was_pruned_counts(num_whole: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels read weights by their addresses."""
    model = ready("llama")
    replies(model, ["full"] * 3, 2)
    mlp = model.hf.base_model.layers[1].mlp
    for name, dim in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        weight = getattr(mlp, name).weight.detach()
        getattr(mlp, name).weight = nn.Parameter(weight.narrow(dim, 0, 16).clone(), requires_grad=False)
    found = replies(model, ["full"] * 3, 2)
    assert len(num_whole) == 2
    monkeypatch.setattr("kvfold.models.cpu_linear.is_wanted", lambda: False)
    torch.testing.assert_close(found, replies(model, ["full"] * 3, 2), rtol=1e-4, atol=1e-4)
