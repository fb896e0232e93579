"""bf16 models on a CPU with AMX: compiled layers are as close to the exact model as transformers' bf16 layers are."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from kvfold.core import has_amx_kernels
from kvfold.engine.runner import Runner
from kvfold.models import cpu_linear, cpu_rows
from kvfold.models.attach import maskless
from kvfold.models.cpu_decoder import Decoder
from kvfold.models.cpu_layer import CompiledLayer, _Echo, parts_of
from kvfold.models.cpu_linear import few_rows
from kvfold.models.loader import Model, wrap
from kvfold.passes.decode import DecodePass
from kvfold.policy.policy import Policy
from tests.tiny import VOCAB_SIZE, prompt, ready, ready_bf16

if not has_amx_kernels():
    pytest.skip("needs AMX and numba", allow_module_level=True)

from kvfold.models import cpu_kernels

STEPS = 6


def models(family: str) -> tuple[Model, Model]:
    """In bf16, and with the same numbers in fp32."""
    shared = ready(family)
    hf = deepcopy(shared.hf).to(torch.bfloat16)
    exact = deepcopy(hf).float()
    return wrap(hf, shared.tokenizer), wrap(exact, shared.tokenizer, kv_dtype=torch.bfloat16)


def replies(model: Model, lens: list[int], tokens: Tensor | None = None, policy: str = "full") -> Tensor:
    """Logits of prompts and of decode steps, with these tokens if they are given."""
    runner = Runner(model.hf, model.spec, model.arena)
    sequences = [runner.new_sequence(Policy.parse(policy)) for _ in lens]
    found = [runner.prefill(sequences, [prompt(length) for length in lens])]
    for step in range(STEPS):
        ids = found[-1].argmax(-1) if tokens is None else tokens[step]
        found.append(runner.decode(sequences, ids.tolist()))
    for sequence in sequences:
        sequence.release()
    return torch.stack(found)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many layers ran alone, and steps in one call."""
    found = {"layers": 0, "steps": 0}
    run, run_all = CompiledLayer._run, Decoder.run

    def counted(self: CompiledLayer, *args: Any) -> Tensor:
        found["layers"] += 1
        return run(self, *args)

    def all_counted(self: Decoder, *args: Any) -> Tensor:
        found["steps"] += 1
        return run_all(self, *args)

    monkeypatch.setattr(CompiledLayer, "_run", counted)
    monkeypatch.setattr(Decoder, "run", all_counted)
    return found


def error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("lens", [[20, 23, 26], [300, 7]], ids=str)  # few rows; more than kernels multiply
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_replies_are_as_exact_as_transformers(
    family: str, lens: list[int], runs: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, exact = models(family)
    truth = replies(exact, lens)
    tokens = truth.argmax(-1)
    runs |= dict.fromkeys(runs, 0)
    found = replies(model, lens, tokens)
    assert runs["steps"] == STEPS and runs["layers"] >= len(lens) * model.spec.num_layers
    monkeypatch.setattr(cpu_linear, "is_wanted", lambda: False)
    plain = replies(model, lens, tokens)
    assert 0 < error(found, truth) <= 1.2 * error(plain, truth)
    assert all(type(module) is not CompiledLayer for module in model.hf.modules())


def test_a_prompt_behind_a_chunk_gives_the_bits_of_one_that_is_read_at_once() -> None:
    """By AMX tiles, over a prefix where it is stored or over the buffer of the pass."""
    model = ready_bf16()
    runner = Runner(model.hf, model.spec, model.arena, chunk_len=288)
    whole, later = (runner.new_sequence(Policy.parse("full")) for _ in range(2))
    expected = runner.prefill([whole], [prompt(300)])
    runner.prefill([later], [prompt(300)[:288]])
    assert torch.equal(runner.prefill([later], [prompt(300)[288:]]), expected)
    for sequence in (whole, later):
        sequence.release()


def test_few_rows_round_as_many_do() -> None:
    """So that a prompt behind a cached prefix says what it says when it is read at once."""
    model, _ = models("qwen2")
    layer = model.hf.base_model.layers[1]
    x = torch.randn(1, 300, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with few_rows(model.hf):
        parts = parts_of(layer)
        assert parts is not None
        compiled, angle = CompiledLayer(layer, parts), torch.rand(1, 300, 8).repeat(1, 1, 2)
        cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        many, few = (compiled._run(x[:, :n], _Echo(), cos[:, :n], sin[:, :n]) for n in (300, 40))
        assert torch.equal(many[:, :40], few)
        for count in (257, 288, 299):
            assert torch.equal(many[:, :count], compiled._run(x[:, :count], _Echo(), cos[:, :count], sin[:, :count]))


def test_blocks_of_many_rows_give_what_a_block_gives() -> None:
    """Rows of an MLP so wide that there are blocks of few of them."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=4128,
        num_hidden_layers=1,
        num_attention_heads=3,
        num_key_value_heads=1,
    )
    hf = Qwen2ForCausalLM(config).to(torch.bfloat16)
    for name, x in hf.named_parameters():
        if name.endswith("bias"):
            x.data.normal_()
    wrap(hf, ready("llama").tokenizer)
    x, angle = torch.randn(1, 700, 96).bfloat16(), torch.rand(1, 700, 16).repeat(1, 1, 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    exact = deepcopy(hf.base_model.layers[0]).float()
    with few_rows(hf), torch.no_grad():
        parts = parts_of(hf.base_model.layers[0])
        assert parts is not None and cpu_rows.has_whole_tiles(parts)
        compiled = CompiledLayer(hf.base_model.layers[0], parts)
        many = compiled._run(x, _Echo(), cos, sin)
        cuts = [[y[:, n : n + 256] for y in (x, cos, sin)] for n in range(0, 700, 256)]
        few = torch.cat([compiled._run(x_1NM, _Echo(), *angles) for x_1NM, *angles in cuts], 1)
        with maskless():
            truth = exact(
                x.float(), attention_mask=None, position_embeddings=(cos.float(), sin.float()), past_key_values=_Echo()
            )
    assert torch.equal(many, few)
    assert error(many.float() - x.float(), truth - x.float()) < 1e-2


def off_line(x: Tensor) -> Tensor:
    """A copy in memory of its own, 8 bytes behind a cache line, where a file that is mapped has weights."""
    room = np.empty(x.nbytes + 128, dtype=np.uint8)
    first = -room.ctypes.data % 64 + 8
    return torch.frombuffer(room[first : first + x.nbytes].data, dtype=x.dtype).view(x.shape).copy_(x)


def test_weights_move_to_cache_lines_once() -> None:
    model, _ = models("llama")
    for parameter in model.hf.parameters():
        parameter.data = off_line(parameter.detach())
    before = {name: x.detach().clone() for name, x in model.hf.named_parameters()}
    found = replies(model, [300, 7])
    places = {name: x.data_ptr() for name, x in model.hf.named_parameters() if "proj" in name or "lm_head" in name}
    assert not any(place % 64 for place in places.values())
    assert all(torch.equal(x, before[name]) for name, x in model.hf.named_parameters())
    assert torch.equal(replies(model, [300, 7]), found)
    assert places == {name: x.data_ptr() for name, x in model.hf.named_parameters() if name in places}


def test_weights_that_are_views_stay() -> None:
    """Somebody may write to the whole."""
    model, _ = models("llama")
    found = replies(model, [300, 7])
    whole = torch.empty(sum(x.numel() for x in model.hf.parameters()) + 4, dtype=torch.bfloat16)
    for parameter, part in zip(
        model.hf.parameters(), whole[4:].split([x.numel() for x in model.hf.parameters()]), strict=True
    ):
        parameter.data = part.view(parameter.shape).copy_(parameter.detach())
    assert torch.equal(replies(model, [300, 7]), found)
    whole.zero_()
    assert not any(x.any() for x in model.hf.parameters())


def test_a_step_gives_the_bits_of_one_that_goes_layer_by_layer(
    runs: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = models("qwen2")
    lens = [20 + 3 * i for i in range(19)]
    found = replies(model, lens)
    assert runs["steps"] == STEPS
    monkeypatch.setattr(DecodePass, "all_layers", lambda _: None)
    assert torch.equal(found, replies(model, lens))


def test_weights_of_another_type_are_seen(runs: dict[str, int]) -> None:
    model, exact = models("llama")
    replies(model, [20, 23])
    model.hf.float()
    fp32 = wrap(model.hf, model.tokenizer, kv_dtype=torch.bfloat16)
    torch.testing.assert_close(replies(fp32, [20, 23]), replies(exact, [20, 23]), rtol=1e-4, atol=1e-4)
    runs |= dict.fromkeys(runs, 0)
    model.hf.half()
    half = wrap(model.hf, model.tokenizer)
    replies(half, [20, 23])
    assert not any(runs.values()), "there are no kernels for fp16"


def test_one_reply_alone_gives_the_bits_of_many(runs: dict[str, int]) -> None:
    model, _ = models("llama")
    tokens = torch.arange(STEPS * 2).view(STEPS, 2)
    both = replies(model, [20, 20], tokens)
    runs |= dict.fromkeys(runs, 0)
    assert torch.equal(replies(model, [20], tokens[:, :1]), both[:, :1])
    assert runs["steps"] == STEPS


def bits(x: Tensor) -> Any:
    return x.view(torch.uint16).numpy()


def test_numbers_are_widened_and_narrowed_as_pytorch_does() -> None:
    every = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16)).view(torch.bfloat16)
    wide = np.empty(1 << 16, dtype=np.float32)
    cpu_kernels.widen(bits(every), wide)
    np.testing.assert_array_equal(wide, every.float().numpy())
    random = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)).view(
        torch.float32
    )
    for numbers in (random, every.float(), every.float() * (1 + 2**-9)):
        found = torch.empty(len(numbers), dtype=torch.bfloat16)
        cpu_kernels.narrow(numbers.numpy(), bits(found))
        torch.testing.assert_close(found, numbers.to(torch.bfloat16), rtol=0, atol=0, equal_nan=True)


def test_kernels_of_rows_round_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x, more = (torch.randn(5, 64, generator=generator).bfloat16() for _ in range(2))
    weight, out, total = torch.rand(64, generator=generator), torch.empty_like(x), torch.empty_like(x)

    def normed(x_NM: Tensor) -> Tensor:
        return functional.rms_norm(x_NM, (64,), weight, 1e-5).bfloat16()

    def check(found: Tensor, expected: Tensor) -> None:
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)

    cpu_kernels.norm_bf16(bits(x), bits(out), weight.numpy(), 1e-5)
    check(out, normed(x.float()))
    cpu_kernels.add_norm_bf16(bits(x), bits(more), bits(total), bits(out), weight.numpy(), 1e-5)
    check(out, normed(x.float() + more.float()))
    assert torch.equal(total, x + more)
    angle = torch.rand(5, 8, generator=generator).repeat(1, 2)
    rotated = torch.empty(5, 64)
    cpu_kernels.rotate_bf16(bits(more), rotated.numpy(), angle.cos().numpy(), angle.sin().numpy())
    heads = more.float().unflatten(1, (4, 16))
    turned = torch.cat((-heads[..., 8:], heads[..., :8]), -1)
    expected = heads * angle.cos().unsqueeze(1) + turned * angle.sin().unsqueeze(1)
    check(rotated.bfloat16(), expected.flatten(1).bfloat16())
    assert torch.equal(rotated, rotated.bfloat16().float())
