"""Attaching: bit for bit sdpa on plain tensors, undone on exit, nothing before it is asked for."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from typing import Any

import pytest
import torch

import kvfold
from kvfold.engine.cuda_graphs import cuda_graphs_of
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, ModelError
from kvfold.models.attach import NAME, arena_of, is_attached, layers_wrapped, set_arena
from kvfold.models.own_model import cpu_has_bf16
from kvfold.pages.arena import Arena
from tests.tiny import FAMILIES, VOCAB_SIZE, build, greedy, prompt, tokenizer


def padded_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCAB_SIZE, (3, 40), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, :33] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@torch.inference_mode()
def logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    found: torch.Tensor = model(**inputs, use_cache=False).logits
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_tensors_give_the_bits_of_sdpa(family: str) -> None:
    model = build(family)
    batch = padded_batch()
    whole = {"input_ids": batch["input_ids"]}
    before = logits(model, batch), logits(model, whole), greedy(model, prompt(40), 8)
    with kvfold.attach(model):
        assert model.config._attn_implementation == NAME
        assert torch.equal(logits(model, batch), before[0])
        assert torch.equal(logits(model, whole), before[1])
        assert greedy(model, prompt(40), 8) == before[2]
    assert model.config._attn_implementation == "sdpa" and not is_attached(model)


def test_undone_after_an_error() -> None:
    model = build()
    with pytest.raises(ZeroDivisionError), kvfold.attach(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_attaching_twice_keeps_the_outer_one() -> None:
    model = build()
    outer = kvfold.attach(model)
    with kvfold.attach(model):
        pass
    assert is_attached(model)
    outer.detach()
    assert not is_attached(model)


def test_the_last_detach_undoes_whichever_comes_last() -> None:
    model = build()
    first, second = kvfold.attach(model), kvfold.attach(model)
    first.detach()
    first.detach()  # again: nothing
    assert is_attached(model)
    second.detach()
    assert model.config._attn_implementation == "sdpa"
    loaded = kvfold.wrap(model, tokenizer())
    again = kvfold.wrap(model, tokenizer())
    loaded.detach()
    assert is_attached(model)
    again.detach()
    assert model.config._attn_implementation == "sdpa"


def test_a_loaded_model_is_taken_for_its_module() -> None:
    model = build()
    own = kvfold.Cache(model, "full")
    wrapped = kvfold.wrap(model, tokenizer(), kv_dtype=torch.bfloat16)
    with kvfold.attach(wrapped):
        cache = kvfold.Cache(wrapped, "full")
        for each in (cache, own):
            model(torch.tensor([prompt(50)]), past_key_values=each)
    assert cache.spec.kv_dtype == torch.bfloat16 and own.spec.kv_dtype == torch.float32
    assert 2 * cache.stats().bytes_per_step < 1.2 * own.stats().bytes_per_step
    cache.reset()
    own.reset()


def test_use_after_detach_is_told() -> None:
    model = build()
    wrapped = kvfold.wrap(model, tokenizer())
    cache, session = kvfold.Cache(model, "full"), kvfold.Session(wrapped, "full", template=None)
    session.extend(prompt(5))
    wrapped.detach()
    with pytest.raises(ModelError, match="was detached from kvfold after this cache was made"):
        model(torch.tensor([prompt(5)]), past_key_values=cache)
    with pytest.raises(ModelError, match="was detached from kvfold"):
        session.generate(max_new_tokens=2)
    session.close()
    with kvfold.attach(model):
        model(torch.tensor([prompt(5)]), past_key_values=cache)
    cache.reset()


def test_a_model_that_has_decoded_is_freed() -> None:
    """Through lanes, as on a GPU: layouts, graphs and specs must not hold the module."""
    model = build()
    wrapped = kvfold.wrap(model, tokenizer(), memory="8MB")
    runner = Runner(model, wrapped.spec, wrapped.arena)
    runner.graphs = cuda_graphs_of(model)
    sequence = runner.new_sequence(kvfold.Policy.parse("full"))
    runner.prefill([sequence], [prompt(40)])
    assert runner.graphs.decode(model, [sequence], [[3]]) is not None
    sequence.release()
    alive = weakref.ref(model)
    del model, wrapped, runner, sequence
    gc.collect()
    assert alive() is None


def test_two_models_at_once() -> None:
    first, second = build(seed=1), build("gemma3", seed=2)
    expected = greedy(first, prompt(30), 8), greedy(second, prompt(30), 8)
    with kvfold.attach(first):
        with kvfold.attach(second):
            assert (_with_cache(first), _with_cache(second)) == expected
        assert not is_attached(second)
        assert _with_cache(first) == expected[0]


def _with_cache(model: Any) -> list[int]:
    ids = torch.tensor([prompt(30)])
    cache = kvfold.Cache(model, "full")
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, pad_token_id=0,
        past_key_values=cache,
    )  # fmt: skip
    tokens: list[int] = found[0, 30:].tolist()
    return tokens


def test_nothing_is_registered_before_attach() -> None:
    code = (
        "import kvfold\nassert kvfold.attach and kvfold.Cache\n"
        "from transformers import AttentionInterface\n"
        "from transformers.masking_utils import AttentionMaskInterface\n"
        "assert 'kvfold' not in AttentionInterface() and 'kvfold' not in AttentionMaskInterface()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_layers_get_their_own_forward_back() -> None:
    model = build()
    layers = model.model.layers

    def hooked(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("only kept, never called")

    layers[0].forward = hooked
    with pytest.raises(KeyboardInterrupt), layers_wrapped(model, lambda _, forward: forward):
        raise KeyboardInterrupt
    assert layers[0].forward is hooked
    assert "forward" not in layers[1].__dict__


def test_unsupported_attention_arguments_are_named() -> None:
    model = build()
    with kvfold.attach(model):
        cache = kvfold.Cache(model, "full")
        with pytest.raises(ModelError, match="`softcap`"):
            model(torch.tensor([prompt(5)]), past_key_values=cache, softcap=30.0)


def test_an_arena_belongs_to_one_model_and_dies_with_it() -> None:
    model, other = build(), build()
    arena = Arena(2**20)
    set_arena(model, arena)
    assert arena_of(model) is arena and arena_of(other) is not arena
    alive = weakref.ref(arena)
    del model, arena
    gc.collect()
    assert alive() is None


def test_an_arena_in_use_is_not_replaced() -> None:
    model = build()
    with kvfold.attach(model):
        set_arena(model, Arena(2**20))
        cache = kvfold.Cache(model, "full")
        model(torch.tensor([prompt(5)]), past_key_values=cache)
        with pytest.raises(InputError, match="close its sessions"):
            set_arena(model, Arena(2**20))
        cache.reset()
        set_arena(model, Arena(2**20))


def test_bf16_that_the_cpu_emulates_is_warned_of() -> None:
    model = build().to(torch.bfloat16)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with kvfold.attach(model):
            pass
        with kvfold.attach(model.float()):
            pass
    found = [str(each.message) for each in told if each.category is kvfold.KvfoldWarning]
    assert len(found) == (not cpu_has_bf16()) and all("dtype=torch.float32" in text for text in found)


def test_caches_of_a_module_have_the_dtype_that_it_was_wrapped_with() -> None:
    """On such CPUs `load` computes in fp32 and stores bf16; the module alone knows no more than its weights."""
    hf = build()
    assert kvfold.Cache(hf, "full").spec.kv_dtype == torch.float32
    kvfold.wrap(hf, tokenizer(), kv_dtype=torch.bfloat16)
    assert kvfold.Cache(hf, "full").spec.kv_dtype == kvfold.wrap(hf, tokenizer()).spec.kv_dtype == torch.bfloat16


def test_caches_of_a_module_share_the_memory_that_it_was_wrapped_with() -> None:
    model = build()
    wrapped = kvfold.wrap(model, tokenizer(), memory="8MB")
    cache = kvfold.Cache(model, "full")
    assert cache.arena.capacity_bytes <= 8_000_000
    assert cache.arena is wrapped.arena
