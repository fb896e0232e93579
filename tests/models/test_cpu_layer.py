"""Compiled decoder layers on a CPU give what transformers' give, and are taken where they are made as Llama's."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvfold.engine.layer_major import LayerMajor
from kvfold.engine.runner import Runner
from kvfold.models import cpu_linear
from kvfold.models.cpu_decoder import Decoder
from kvfold.models.cpu_layer import CompiledLayer, compiled_layers
from kvfold.models.cpu_linear import FewRows, few_rows
from kvfold.models.digest import parameters_digest, values_digest
from kvfold.models.loader import Model, wrap
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy
from tests.tiny import prompt, ready

pytest.importorskip("numba")


@pytest.fixture(autouse=True)
def wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever PyTorch multiplies by."""
    monkeypatch.setattr(cpu_linear, "is_wanted", lambda: True)


def replies(model: Model, num_rows: int, steps: int) -> Tensor:
    """Logits of decode steps after prompts of several lengths."""
    runner = Runner(model.hf, model.spec, model.arena)
    sequences = [runner.new_sequence(Policy.parse("full")) for _ in range(num_rows)]
    found = [runner.prefill(sequences, [prompt(20 + 3 * i) for i in range(num_rows)])]
    for _ in range(steps):
        found.append(runner.decode(sequences, found[-1].argmax(-1).tolist()))
    for sequence in sequences:
        sequence.release()
    return torch.stack(found)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every compiled layer that ran, alone or with all others."""
    found: list[int] = []
    run, run_all = CompiledLayer._run, Decoder.run

    def counted(self: CompiledLayer, hidden_states: Tensor, *args: Any) -> Tensor:
        found.append(hidden_states.shape[1])
        return run(self, hidden_states, *args)

    def all_counted(self: Decoder, hidden_1NM: Tensor, *args: Any) -> Tensor:
        found.extend([hidden_1NM.shape[1]] * len(self._layers))
        return run_all(self, hidden_1NM, *args)

    monkeypatch.setattr(CompiledLayer, "_run", counted)
    monkeypatch.setattr(Decoder, "run", all_counted)
    return found


@pytest.mark.parametrize("num_rows", [2, 5])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_prompts_and_steps_say_the_same(
    family: str, num_rows: int, runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ready(family)
    found = replies(model, num_rows, 4)
    passes = [3, *(20 + 3 * i for i in range(num_rows)), *[num_rows] * 4]  # to compare, prompts, steps
    assert sorted(runs) == sorted(passes * model.spec.num_layers)
    monkeypatch.setattr(cpu_linear, "is_wanted", lambda: False)
    torch.testing.assert_close(found, replies(model, num_rows, 4), rtol=1e-4, atol=1e-4)
    assert all(type(module) is not CompiledLayer for module in model.hf.modules())


def test_a_bias_that_a_layer_is_given_later_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of whole layers have none; such a layer runs product by product from then on."""
    shared = ready("llama")
    hf = deepcopy(shared.hf)
    model = wrap(hf, shared.tokenizer)
    before = replies(model, 3, 2)
    for layer in hf.base_model.layers:
        bias = torch.linspace(-1, 1, layer.mlp.down_proj.out_features)
        layer.mlp.down_proj.bias = nn.Parameter(bias, requires_grad=False)
    found = replies(model, 3, 2)
    monkeypatch.setattr(cpu_linear, "is_wanted", lambda: False)
    torch.testing.assert_close(found, replies(model, 3, 2), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[0], before[0], atol=1e-2)


def _narrow_norm(layer: Any) -> None:
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data[:1] * 2  # it is broadcast


def _cut_mlp(layer: Any) -> None:
    """Where the weights are, so that they begin at the same address."""
    for name in ("gate_proj", "up_proj"):
        getattr(layer.mlp, name).weight.data = getattr(layer.mlp, name).weight.data[:64]
    layer.mlp.down_proj.weight.data = layer.mlp.down_proj.weight.data[:, :64].contiguous()


@pytest.mark.parametrize("change", [_narrow_norm, _cut_mlp])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_weights_that_change_their_shape_between_steps_count(
    family: str, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ready(family)
    model = wrap(deepcopy(shared.hf), shared.tokenizer)
    replies(model, 3, 2)
    for layer in model.hf.base_model.layers:
        change(layer)
    found = replies(model, 3, 2)
    monkeypatch.setattr(cpu_linear, "is_wanted", lambda: False)
    torch.testing.assert_close(found, replies(model, 3, 2), rtol=1e-4, atol=1e-4)


def test_inputs_that_weights_do_not_fit_are_pytorchs_error() -> None:
    shared = ready("llama")
    model = wrap(deepcopy(shared.hf), shared.tokenizer)
    replies(model, 3, 2)
    for layer in model.hf.base_model.layers:
        for name in ("gate_proj", "up_proj"):
            getattr(layer.mlp, name).weight.data = getattr(layer.mlp, name).weight.data[:64].clone()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        replies(model, 3, 2)


def test_one_layer_of_a_group_in_another_type_is_left_alone() -> None:
    model = ready("llama").hf
    attention: Any = model.base_model.layers[0].self_attn
    with few_rows(model):
        assert type(attention.k_proj) is FewRows
    attention.k_proj.to(torch.bfloat16)
    with few_rows(model):
        kinds = [type(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj")]
    assert FewRows not in kinds


def test_weights_have_one_digest_within_a_pass_and_outside() -> None:
    """A policy may ask for it while layers run."""
    hf = ready("llama").hf
    digests = parameters_digest(hf), values_digest(hf)
    with few_rows(hf), compiled_layers(hf):
        assert type(hf.base_model.layers[0]) is CompiledLayer
        assert (parameters_digest(hf), values_digest(hf)) == digests
        assert type(hf.base_model.layers[0]) is CompiledLayer


def test_long_prompts_say_the_same(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more rows than kernels multiply, shared among threads."""
    model = ready("llama")
    monkeypatch.setattr("kvfold.models.cpu_rows._FEWEST_NUMBERS", 1)

    def logits() -> Tensor:
        sequence = Runner(model.hf, model.spec, model.arena, chunk_len=150).new_sequence(Policy.parse("full"))
        found = Runner(model.hf, model.spec, model.arena, chunk_len=150).prefill([sequence], [prompt(210)])
        sequence.release()
        return found

    found = logits()
    assert {60, 150} <= set(runs)
    monkeypatch.setattr(cpu_linear, "is_wanted", lambda: False)
    torch.testing.assert_close(found, logits(), rtol=1e-4, atol=1e-4)


LAST_QUERIES = {
    "full": [0, 2],
    "keydiff + 4x + int4": [0, 2],
    "snapkv(window=8) + 4x": [8, 8],
    "h2o + 4x": [150, 60],
    "expected + 4x": [150, 60],
    "kvzip(chunk=64) + 4x": [0, 2],
    "knorm + 80tok + between_chunks(chunk=75)": [2, 2, 2],
}


@pytest.mark.parametrize("policy", LAST_QUERIES)
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_last_layer_runs_only_what_is_used(family: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two pieces, of 150 and 60 tokens: the last token's row, and the queries that a scorer observes."""
    model, rows = ready(family), dict[int, list[int]]()
    attend = PrefillPass.attend

    def counted(self: PrefillPass, layer: int, index: int, q_QTD: Tensor, *new: Tensor) -> Tensor:
        rows.setdefault(layer, []).append(q_QTD.shape[1])
        return attend(self, layer, index, q_QTD, *new)

    def logits() -> Tensor:
        runner = Runner(model.hf, model.spec, model.arena, chunk_len=150)
        sequence = runner.new_sequence(Policy.parse(policy))
        found = [runner.prefill([sequence], [prompt(210)])]
        found += [runner.decode([sequence], [token]) for token in prompt(6, seed=1)]
        sequence.release()
        return torch.cat(found)

    monkeypatch.setattr(PrefillPass, "attend", counted)
    found = logits()
    first, *_, last = (rows[layer] for layer in range(model.spec.num_layers))
    assert sum(first) == 210
    assert last == LAST_QUERIES[policy]
    rows.clear()
    monkeypatch.setattr(LayerMajor, "_num_wanted", lambda *_: None)
    torch.testing.assert_close(found, logits(), rtol=1e-4, atol=1e-4)
    assert sum(rows[model.spec.num_layers - 1]) == 210


def test_one_row_stays_with_pytorch(runs: list[int]) -> None:
    replies(ready("llama"), 1, 2)
    assert 1 not in runs


def taken(model: Model) -> list[bool]:
    with few_rows(model.hf), compiled_layers(model.hf):
        return [type(layer) is CompiledLayer for layer in model.hf.base_model.layers]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_neox"])
def test_layers_made_otherwise_are_left_alone(family: str) -> None:
    assert not any(taken(ready(family)))


def test_layers_that_changed_are_left_alone() -> None:
    model = ready("llama")
    first, second, third = model.hf.base_model.layers
    assert taken(model) == [True, True, True]
    first.input_layernorm.register_forward_hook(lambda *_: None)
    assert taken(model) == [False, True, True]
    second.self_attn.q_proj = nn.Sequential(second.self_attn.q_proj)
    assert taken(model) == [False, False, True]
    third.forward = third.forward
    assert taken(model) == [False, False, False]


def test_layers_whose_hooks_are_gone_are_taken_again() -> None:
    model = ready("llama")
    first = model.hf.base_model.layers[0]
    hooked: list[Any] = [first, first.mlp, first.mlp.act_fn, first.mlp.up_proj, first.input_layernorm]
    for module in hooked:
        hook = module.register_forward_hook(lambda *_: None)
        assert taken(model) == [False, True, True]
        hook.remove()
        assert taken(model) == [True, True, True]
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert taken(model) == [False, False, False]
    hook.remove()
    assert taken(model) == [True, True, True]


def test_other_activations_of_the_same_name_are_left_alone() -> None:
    class SiLU(nn.ReLU):
        pass

    model = ready("llama")
    assert taken(model) == [True, True, True]  # layers are compared with theirs no more
    model.hf.base_model.layers[1].mlp.act_fn = SiLU()
    assert taken(model) == [True, False, True]


def test_weights_of_other_types_stay_with_pytorch() -> None:
    """As those that are quantised: they have no memory of fp32 numbers."""

    class Wrapped(torch.Tensor):
        pass

    model = ready("llama")
    for module in (model.hf.base_model.layers[0].mlp.up_proj, model.hf.base_model.layers[1].input_layernorm):
        module.weight = nn.Parameter(module.weight.detach().as_subclass(Wrapped), requires_grad=False)
    assert taken(model) == [False, False, True]


def test_weights_and_norms_that_were_replaced_count(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ready("llama")
    before = replies(model, 2, 2)
    layer: Any = model.hf.base_model.layers[0]
    layer.post_attention_layernorm = deepcopy(layer.post_attention_layernorm)
    layer.post_attention_layernorm.weight.data *= 2
    layer.input_layernorm.weight.data = layer.input_layernorm.weight.data * 0.5
    found = replies(model, 2, 2)
    assert taken(model) == [True, True, True]
    monkeypatch.setattr(cpu_linear, "is_wanted", lambda: False)
    torch.testing.assert_close(found, replies(model, 2, 2), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, before)


def test_a_layer_that_computes_otherwise_is_left_alone() -> None:
    class Scaled(type(ready("llama").hf.base_model.layers[0])):  # type: ignore[misc]
        """Has the modules of Llama's."""

        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            found: Tensor = super().forward(hidden_states, **kwargs)
            return hidden_states + 0.9 * (found - hidden_states)

    model = ready("llama")
    model.hf.base_model.layers[1].__class__ = Scaled
    assert taken(model) == [True, False, True]
