"""The KV cache shape of a transformers model (ModelSpec); unsupported architectures are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from kvfold.core import LayerSpec, ModelSpec, Rope
from kvfold.errors import ModelError
from kvfold.models.digest import parameters_digest

_INTERLEAVED = {"cohere", "cohere2", "glm", "glm4", "gptj", "ernie4_5", "helium"}
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
_OPENS_CACHE = {"doge", "jetmoe"}  # their layers compute with what the cache returns, before attention
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "wo")
_LOGIT_CHANGES = ("logit_scale", "logits_scaling", "final_logit_softcapping")


def read_spec(hf: Any, kv_dtype: torch.dtype | None = None) -> ModelSpec:
    """The spec of a causal language model; ModelError names what is not supported."""
    config = hf.config.get_text_config()
    _refuse(hf, config)
    attentions = attention_modules(hf)
    dtype = next(hf.parameters()).dtype
    eos = config.eos_token_id if hf.generation_config is None else hf.generation_config.eos_token_id
    eos_ids = eos if isinstance(eos, (list, tuple)) else [eos]
    return ModelSpec(
        name=_name(str(getattr(hf.config, "_name_or_path", ""))) or config.model_type,
        family=config.model_type,
        layers=tuple(_layer(hf, config, i, module) for i, module in enumerate(attentions)),
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
        max_positions=int(getattr(config, "max_position_embeddings", 0) or 0),
        vocab_size=int(config.vocab_size),
        eos_token_ids=frozenset(int(i) for i in eos_ids if i is not None),
        digest=partial(_digest, ref(hf)),
    )


def _name(name_or_path: str) -> str:
    """A folder's own name without its path, which a server's clients must not see."""
    folder = Path(name_or_path)
    return folder.resolve().name if name_or_path and folder.is_dir() else name_or_path


def _digest(model: ref[nn.Module]) -> str:
    """Layouts and CUDA graphs hold specs, so a spec holds its model weakly."""
    hf = model()
    if hf is None:
        raise ModelError("the model was deleted, so its weights cannot be hashed any more; keep it until they are")
    return parameters_digest(hf)


def decoder_layers(hf: Any) -> list[nn.Module]:
    """The decoder blocks of the model, in order."""
    layers = getattr(hf.base_model, "layers", None)
    if layers is None:
        raise ModelError(
            f"{type(hf).__name__} keeps its decoder layers under another name than `layers`, as GPT-2 and OPT do; this "
            "family is not supported: use one such as Llama, Qwen or Gemma 3"
        )
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


def output_head(hf: Any) -> nn.Module:
    """The LM head; ModelError where the model changes logits after it."""
    config = hf.config.get_text_config()
    changes = [name for name in _LOGIT_CHANGES if getattr(config, name, None) not in (None, 1, 1.0)]
    if changes:
        raise ModelError(f"{type(hf).__name__} applies {changes[0]} to its logits; kvfold scores texts without it only")
    head: nn.Module = hf.get_output_embeddings()
    return head


def _refuse(hf: Any, config: Any) -> None:
    """ModelError for the first unsupported feature."""
    for reason in _foreign(hf, config):
        raise ModelError(f"{type(hf).__name__} ({config.model_type}) {reason}")


def _foreign(hf: Any, config: Any) -> Iterator[str]:
    if getattr(hf.config, "is_encoder_decoder", False):
        yield "is an encoder-decoder model; kvfold supports decoder-only models"
    if any(getattr(hf.config, name, None) is not None for name in ("vision_config", "audio_config")):
        yield "has a vision or audio tower; load its text model (…ForCausalLM) instead"
    if getattr(config, "kv_lora_rank", None):
        yield "uses multi-head latent attention (MLA), whose cache is a latent already; kvfold supports plain KV heads"
    if any(hasattr(config, name) for name in ("ssm_cfg", "state_size", "mamba_d_state")):
        yield "has state-space layers, which keep no KV cache to compress; kvfold supports attention in every layer"
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if foreign:
        yield f"has layers of type {', '.join(foreign)}; kvfold runs {' and '.join(sorted(_LAYER_TYPES))}"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "shares keys and values between layers; kvfold supports layers with keys and values of their own"
    if getattr(config, "alibi", False) or config.model_type in {"bloom", "mpt"}:
        yield "uses ALiBi, a bias on distances that kvfold does not apply; kvfold supports rotary positions"
    if getattr(config, "attn_logit_softcapping", None):
        yield "soft-caps attention logits, which kvfold's attention does not do"
    if config.model_type in _OPENS_CACHE:
        yield "changes cached keys or values before it calls its attention function; kvfold hands out none"
    if getattr(config, "use_bidirectional_attention", False):
        yield "attends in both directions; kvfold supports causal models"
    if any(name.rpartition(".")[2] == "sinks" for name, _ in hf.named_parameters()):
        yield "has learned sinks in its softmax, which kvfold's attention does not know"
    if any(name.rpartition(".")[2] == "lambda_q1" for name, _ in hf.named_parameters()):
        yield "uses differential attention, two softmaxes over halves of the values; kvfold supports plain attention"
    if not getattr(hf, "_supports_attention_backend", False):
        yield "does not take registered attention functions in this version of transformers"


def _layer(hf: Any, config: Any, index: int, module: nn.Module) -> LayerSpec:
    num_query_heads = int(config.num_attention_heads)
    head_dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
    head_dim = int(head_dim or config.hidden_size // num_query_heads)
    num_kv_heads = int(getattr(config, "num_key_value_heads", None) or num_query_heads)
    _check_heads(hf, module, num_query_heads * head_dim, num_kv_heads * head_dim)
    return LayerSpec(
        num_kv_heads=num_kv_heads,
        num_query_heads=num_query_heads,
        head_dim=head_dim,
        scale=float(module.scaling),  # type: ignore[arg-type]
        sliding_window=_sliding_window(config, index),
        rope=_rope(hf, config, index),
        wo_MX=_output_weight(module, num_query_heads * head_dim),
    )


def _check_heads(hf: Any, module: nn.Module, query_width: int, key_width: int) -> None:
    """ModelError if the layer projects to other widths than its config says, where its projections have usual names."""
    fused = query_width + 2 * key_width
    for name, width in (("k_proj", key_width), ("qkv_proj", fused), ("query_key_value", fused)):
        found = getattr(getattr(module, name, None), "out_features", width)
        if found != width:
            raise ModelError(
                f"{type(hf).__name__}: {name} of a layer has {found} outputs, but num_attention_heads and "
                f"num_key_value_heads of its config make {width}; correct the config"
            )


def _output_weight(module: nn.Module, num_inputs: int) -> Tensor | None:
    """The weight of the output projection (o_proj), where the module has one by a usual name."""
    for name in _OUTPUT_NAMES:
        found = getattr(module, name, None)
        if isinstance(found, nn.Linear) and found.weight.shape[1] == num_inputs and found.weight.is_floating_point():
            return found.weight
    return None


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
