"""Read a transformers model's cache shape, and refuse by name what kvfold cannot serve."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvfold.core import LayerSpec, ModelSpec, Rope
from kvfold.errors import ModelError

_INTERLEAVED = {"cohere", "cohere2", "glm", "glm4", "gptj", "ernie4_5", "helium"}
_LENGTH_DEPENDENT = {"dynamic", "longrope"}


def read_spec(hf: Any, kv_dtype: torch.dtype | None = None) -> ModelSpec:
    """The spec of a causal language model; ModelError names what is not supported."""
    config = hf.config.get_text_config()
    _refuse(hf, config)
    attentions = attention_modules(hf)
    dtype = next(hf.parameters()).dtype
    eos = config.eos_token_id if hf.generation_config is None else hf.generation_config.eos_token_id
    eos_ids = eos if isinstance(eos, (list, tuple)) else [eos]
    return ModelSpec(
        name=str(getattr(hf.config, "_name_or_path", "") or config.model_type),
        family=config.model_type,
        layers=tuple(_layer(hf, config, i, module) for i, module in enumerate(attentions)),
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        max_positions=int(getattr(config, "max_position_embeddings", 0) or 0),
        vocab_size=int(config.vocab_size),
        eos_token_ids=frozenset(int(i) for i in eos_ids if i is not None),
    )


def decoder_layers(hf: Any) -> list[nn.Module]:
    """The blocks the model runs one after another."""
    layers = getattr(hf.base_model, "layers", None)
    if layers is None:
        raise ModelError(f"{type(hf).__name__} has no list of decoder layers; kvfold runs decoder-only transformers")
    return list(layers)


def attention_modules(hf: Any) -> list[nn.Module]:
    found = []
    for block in decoder_layers(hf):
        mine = [m for m in block.modules() if isinstance(getattr(m, "layer_idx", None), int) and hasattr(m, "scaling")]
        if len(mine) != 1:
            raise ModelError(
                f"{type(hf).__name__}: a decoder layer has {len(mine)} attention modules that kvfold can read; "
                "supported are models whose every layer has one standard attention, such as Llama, Qwen or Gemma 3"
            )
        found += mine
    return found


def _refuse(hf: Any, config: Any) -> None:
    """One sentence for each kind of model that cannot work."""
    name = f"{type(hf).__name__} ({config.model_type})"
    if getattr(hf.config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder model; kvfold supports decoder-only models")
    if getattr(hf.config, "vision_config", None) is not None or getattr(hf.config, "audio_config", None) is not None:
        raise ModelError(f"{name} has a vision or audio tower; load its text model (…ForCausalLM) instead")
    if getattr(config, "kv_lora_rank", None):
        raise ModelError(f"{name} uses multi-head latent attention (MLA), whose cache is already a latent")
    kinds = getattr(config, "layer_types", None) or ()
    linear = any("attention" not in kind or "linear" in kind for kind in kinds)
    if linear or any(hasattr(config, key) for key in ("ssm_cfg", "state_size", "mamba_d_state")):
        raise ModelError(f"{name} has state-space or linear-attention layers, which keep no KV cache to compress")
    if getattr(config, "alibi", False) or config.model_type in {"bloom", "mpt"}:
        raise ModelError(f"{name} uses ALiBi, a bias on true distances that kvfold does not apply")
    if getattr(config, "attn_logit_softcapping", None):
        raise ModelError(f"{name} soft-caps attention logits, which kvfold's attention does not do")
    if not getattr(hf, "_supports_attention_backend", False):
        raise ModelError(f"{name} does not take registered attention functions in this version of transformers")


def _layer(hf: Any, config: Any, index: int, module: nn.Module) -> LayerSpec:
    num_query_heads = int(config.num_attention_heads)
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    return LayerSpec(
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or num_query_heads),
        num_query_heads=num_query_heads,
        head_dim=int(head_dim or config.hidden_size // num_query_heads),
        scale=float(module.scaling),  # type: ignore[arg-type]
        sliding_window=_sliding_window(config, index),
        rope=_rope(hf, config, index),
    )


def _sliding_window(config: Any, index: int) -> int | None:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if kinds is not None:
        return window if kinds[index] == "sliding_attention" else None
    return window if getattr(config, "use_sliding_window", True) else None


def _rope(hf: Any, config: Any, index: int) -> Rope | None:
    module = getattr(hf.base_model, "rotary_emb", None)
    if module is None:
        return None
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds is not None else ""
    prefix = f"{kind}_" if hasattr(module, f"{kind}_inv_freq") else ""
    rope_type = module.rope_type[kind] if isinstance(module.rope_type, dict) else module.rope_type
    return Rope(
        frequencies=tuple(getattr(module, f"{prefix}inv_freq").double().tolist()),
        attention_scale=float(getattr(module, f"{prefix}attention_scaling")),
        interleaved=config.model_type in _INTERLEAVED,
        depends_on_length=rope_type in _LENGTH_DEPENDENT,
    )
