"""What the connector has to know of a vLLM engine: digest of its weights, dtypes, positions; what it cannot work with.

Keys are bound to the content of the weight files, not to their path. What makes stored blocks wrong, or cannot be
told from the configuration, is refused when the engine starts; what makes packed prefixes wrong is kept as a reason
that every request for one gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvfold.errors import InputError
from kvfold.models.digest import weights_digest
from kvfold.packed.entry import rope_digest
from kvfold.store.entry.format import signer_of
from kvfold.store.key import Binding
from kvfold.vllm.settings import Settings

_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class EngineFacts:
    """One engine: what chunks are bound to, and why packed prefixes cannot be served, if they cannot."""

    chunks: Binding  # without layout, rank and tenant
    block_size: int
    packed_refusal: str | None

    @classmethod
    def read(cls, config: Any, kv_cache_config: Any, settings: Settings, secret: bytes) -> EngineFacts:
        """InputError names what the connector cannot work with."""
        for reason in _engine_reasons(config, kv_cache_config):
            raise InputError(f"kvfold's connector {reason}")
        model, block_size = config.model_config, config.cache_config.block_size
        chunks = Binding(
            kind="chunks",
            weights=weights_digest(_folder(model)),
            dtype=str(model.dtype),
            kv_dtype=str(config.cache_config.cache_dtype),
            rope=rope_digest(model.hf_text_config),
            tokenizer="",
            policy=f"vllm {vllm.__version__} {model.quantization or ''}".strip(),
            pages="",
            prefill_len=0,
            chunk_len=settings.chunk_tokens(block_size),
            tenant="",
            signer=signer_of(secret),
        )
        return cls(chunks, block_size, next(_packed_reasons(config, kv_cache_config), None))

    def binding(self, tenant: str, layout: str = "") -> Binding:
        """Of chunks of one tenant; `layout` is that of one worker's blocks, empty in the chain of digests."""
        return replace(self.chunks, tenant=tenant, pages=layout)

    def packed_mismatch(self, entry: dict[str, Any]) -> str | None:
        """Why an entry with this binding does not fit the engine."""
        chunks = self.chunks
        if entry.get("weights") != chunks.weights:
            return "it was packed with other weights; pack the document again with the model that vLLM serves"
        if entry.get("dtype") != chunks.dtype:
            return f"it was packed in {entry.get('dtype')}, and vLLM runs {chunks.dtype}; pack it again in that"
        if entry.get("rope") != chunks.rope:
            return "it was packed with other rotary positions; pack it again without --rope, or as vLLM is set"
        return None


def _folder(model: Any) -> Path:
    if Path(model.model).is_dir():
        return Path(model.model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))


def _engine_reasons(config: Any, kv_cache_config: Any) -> Iterator[str]:
    """Why stored blocks could be wrong."""
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        yield 'computes again what cannot be loaded; set "kv_load_failure_policy": "recompute"'
    if config.load_config.load_format == "dummy":
        yield "names entries by the weight files, which load_format dummy does not read; use another one"
    if getattr(config.parallel_config, "decode_context_parallel_size", 1) > 1:
        yield "expects all tokens of a head on one rank; set decode_context_parallel_size to 1"
    speculative = config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        yield f"does not store the KV cache of a draft model ({speculative.method}); use ngram, or none"
    if len(kv_cache_config.kv_cache_groups) != 1:
        yield "stores models whose layers share one block table; pass --disable-hybrid-kv-cache-manager"
    for spec in _specs(kv_cache_config):
        if not isinstance(spec, FullAttentionSpec):
            yield f"stores full attention, and this model has {type(spec).__name__}; use another model"


def _packed_reasons(config: Any, kv_cache_config: Any) -> Iterator[str]:
    """Why packed prefixes would be wrong."""
    text = config.model_config.hf_text_config
    rope = getattr(text, "rope_parameters", None) or {}
    if any(spec.sliding_window or spec.attention_chunk_size for spec in _specs(kv_cache_config)):
        yield "the model has sliding-window layers, whose windows count tokens that are no longer there"
    if getattr(text, "alibi", False):
        yield "the model uses ALiBi, whose distances cannot be moved"
    if "rope_type" not in rope:
        yield "the model has no rotary positions of one kind, so keys cannot be moved"
    elif rope["rope_type"] in _LENGTH_DEPENDENT:
        yield f"the model uses length-dependent RoPE scaling ({rope['rope_type']})"
    if "mrope_section" in rope:
        yield "the model has positions in three dimensions (M-RoPE)"
    if config.cache_config.cache_dtype not in ("auto", str(config.model_config.dtype).removeprefix("torch.")):
        yield f"vLLM quantises its KV cache ({config.cache_config.cache_dtype}), and entries hold the model's dtype"
    if config.model_config.quantization:
        yield f"vLLM quantises the weights ({config.model_config.quantization}), and entries are made with others"


def _specs(kv_cache_config: Any) -> list[Any]:
    """Specs of all layers."""
    found = []
    for group in kv_cache_config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        found += list(inner.values()) if inner else [group.kv_cache_spec]
    return found
