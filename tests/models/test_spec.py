"""Reading a model's cache shape, and refusing by name what cannot be served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import GenerationConfig

import kvfold
from kvfold.errors import ModelError, PolicyError
from kvfold.models.check import check_policy
from kvfold.models.spec import output_head, read_spec
from kvfold.policy.policy import Policy
from tests.tiny import FAMILIES, VOCAB_SIZE, WINDOW, build

SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 8}


def _t5() -> Any:
    return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=32, num_layers=1))


def _mla() -> Any:
    heads = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS}
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**SMALL, **heads, **experts))


def _llava() -> Any:
    vision = hf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return hf.LlavaForConditionalGeneration(hf.LlavaConfig(vision_config=vision, text_config=hf.LlamaConfig(**SMALL)))


def _gemma3n() -> Any:
    config = hf.Gemma3nTextConfig(
        **SMALL, num_kv_shared_layers=1, layer_types=["full_attention"] * 2, vocab_size_per_layer_input=50,
        activation_sparsity_pattern=[0.0] * 2,
    )  # fmt: skip
    return hf.Gemma3nForCausalLM(config)


def _linear() -> Any:
    return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**SMALL, num_key_value_heads=2, num_experts=2, **EXPERTS))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder-decoder": (_t5, r"T5ForConditionalGeneration \(t5\) is an encoder-decoder"),
    "alibi bloom": (lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1)), "ALiBi"),
    "alibi mpt": (lambda: hf.MptForCausalLM(hf.MptConfig(vocab_size=50, d_model=32, n_layers=1, n_heads=4)), "ALiBi"),
    "state space": (
        lambda: hf.MambaForCausalLM(hf.MambaConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1)),
        "state-space",
    ),
    "latent": (_mla, "MLA"),
    "vision": (_llava, "vision or audio tower"),
    "softcapping": (
        lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SMALL, num_key_value_heads=2, head_dim=8)),
        "soft-caps",
    ),
    "linear attention": (_linear, "layers of type linear_attention; kvfold runs full_attention and sliding"),
    "shared layers": (_gemma3n, "shares keys and values between layers"),
    "learned sinks": (
        lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SMALL, num_local_experts=2, num_experts_per_tok=1)),
        "learned sinks",
    ),
    "both directions": (
        lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True)),
        "both directions",
    ),
    "learned positions": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=4)),
        "decoder layers under another name than `layers`, as GPT-2 and OPT do",
    ),
    "differential attention": (
        lambda: hf.DiffLlamaForCausalLM(hf.DiffLlamaConfig(**SMALL, num_key_value_heads=2)),
        "uses differential attention",
    ),
    "stray option": (
        lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL, num_key_value_heads=2)),
        "query_key_value of a layer has 96 outputs, but .* make 64; correct the config",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    model = make()
    before = model.config._attn_implementation
    with pytest.raises(ModelError, match=message) as caught:
        kvfold.attach(model)
    assert type(model).__name__ in str(caught.value) and "\n" not in str(caught.value)
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_is_that_of_the_cache(family: str) -> None:
    """Heads, dims and windows are those of the tensors the model itself caches."""
    model = build(family)
    spec = read_spec(model)
    with torch.inference_mode():
        cached = model(torch.zeros(1, 60, dtype=torch.int64), use_cache=True).past_key_values
    assert spec.num_layers == len(cached.layers) == 3 and spec.vocab_size == VOCAB_SIZE
    for layer, held in zip(spec.layers, cached.layers, strict=True):
        assert (1, layer.num_kv_heads, held.keys.shape[2], layer.head_dim) == held.keys.shape
        assert held.keys.shape[2] == (60 if layer.sliding_window is None else layer.sliding_window - 1)


def test_sliding_layers() -> None:
    assert [layer.sliding_window for layer in read_spec(build("gemma3")).layers] == [WINDOW, None, WINDOW]
    assert read_spec(build("mistral_sliding")).compressible_layers == ()
    assert read_spec(build("mistral")).compressible_layers == (0, 1, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_turns_as_the_model_does(family: str) -> None:
    """The angles of every layer's Rope give the model's own cos and sin, its scaling included."""
    model = build(family)
    spec, rotary = read_spec(model), model.base_model.rotary_emb
    positions = torch.tensor([0, 1, 17, 500])
    kinds = getattr(model.config, "layer_types", None) if family == "gemma3" else None
    for index, layer in enumerate(spec.layers):
        extra = {} if kinds is None else {"layer_type": kinds[index]}
        cos, sin = rotary(torch.zeros(1), positions.unsqueeze(0), **extra)
        assert layer.rope is not None and layer.rope.rotary_dim == cos.shape[-1]
        angles = layer.rope.angles(positions)
        scale = layer.rope.attention_scale
        torch.testing.assert_close(angles.cos().repeat(1, 2) * scale, cos[0], atol=1e-4, rtol=0)
        torch.testing.assert_close(angles.sin().repeat(1, 2) * scale, sin[0], atol=1e-4, rtol=0)


def test_partial_rotary_and_scaled_kinds() -> None:
    partial = read_spec(build("gpt_neox")).layers[0]
    assert partial.rope is not None and partial.rope.rotary_dim < partial.head_dim
    yarn = read_spec(build("yarn")).layers[0].rope
    assert yarn is not None and yarn.attention_scale > 1 and not yarn.depends_on_length


def test_end_tokens_are_those_of_generation() -> None:
    model = build()
    assert read_spec(model).eos_token_ids == frozenset()
    model.generation_config = GenerationConfig(eos_token_id=[3, 5])
    assert read_spec(model).eos_token_ids == {3, 5}
    model.generation_config.eos_token_id = 7
    assert read_spec(model).eos_token_ids == {7}


def test_slot_positions_need_fixed_frequencies() -> None:
    policy = Policy.parse("streaming + 64tok + slot")
    check_policy(policy, read_spec(build("yarn")))
    with pytest.raises(PolicyError, match="depend on the length, so use keep"):
        check_policy(policy, read_spec(build("dynamic_rope")))


def test_a_codec_for_layers_that_are_not_there_is_refused() -> None:
    check_policy(Policy.parse("int4(layers=2:)"), read_spec(build()))
    with pytest.raises(PolicyError, match="layers=3: holds none of the 3 layers"):
        check_policy(Policy.parse("int4(layers=3:)"), read_spec(build()))


def test_nothing_to_compress_is_refused() -> None:
    spec = read_spec(build("mistral_sliding"))
    for advised in ("full", "int4"):
        check_policy(Policy.parse(advised), spec)
    with pytest.raises(PolicyError, match=r"every layer of .* is a sliding window, .*; use full, or a codec"):
        check_policy(Policy.parse("knorm + 64tok"), spec)


def test_logits_changed_after_the_head_cannot_be_scored() -> None:
    assert output_head(build()) is not None
    granite = hf.GraniteForCausalLM(hf.GraniteConfig(**SMALL, logits_scaling=2.0))
    with pytest.raises(ModelError, match="logits_scaling"):
        output_head(granite)
