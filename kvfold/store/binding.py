"""What stored prefixes of a model under a policy are bound to, in which form they are kept, and what is refused.

Where everything is kept as the model computed it, any whole chunk of a prompt is of use to every prompt that begins the
same. What was compressed, or coded by a codec that learns, depends on where the compression happened: it is kept as a
snapshot at that length, and serves prompts that begin with exactly those tokens.
"""

from __future__ import annotations

from typing import Any

from kvfold.core import ModelSpec
from kvfold.errors import InputError, ModelError, PolicyError
from kvfold.models.loader import Model
from kvfold.pages.page_config import PageConfig
from kvfold.policy.policy import Policy
from kvfold.policy.registry import term_of
from kvfold.store.key import Binding, Kind, digest_text


def bind(
    model: Model,
    policy: Policy,
    config: PageConfig,
    *,
    prefill_len: int,
    chunk_len: int,
    tenant: str,
    form: str = "exact",
    signer: str = "",
) -> Binding:
    """PolicyError or ModelError, with the reason, if prefixes cannot be reused; InputError if not in this form."""
    check_reuse(policy, model.spec)
    kind = kind_of(policy, model.spec)
    if kind == "snapshots" and form != "exact":
        raise InputError(
            f'prefixes of {model.spec.name} under "{policy.short}" are snapshots, which are stored in the form exact '
            f"alone, not {form}; other forms are for policies that keep everything, such as full"
        )
    return Binding(
        kind=kind,
        weights=model.values_digest,
        dtype=str(model.spec.dtype),
        kv_dtype=str(model.spec.kv_dtype),
        rope=_rope_digest(model.spec),
        tokenizer=tokenizer_digest(model.tokenizer),
        policy=policy.fingerprint,
        pages="" if kind == "chunks" else f"{config.page_size}/{config.open_len}",
        prefill_len=prefill_len,
        chunk_len=chunk_len,
        tenant=tenant,
        form=form,
        signer=signer,
    )


def kind_of(policy: Policy, spec: ModelSpec) -> Kind:
    """Sliding windows forget what a shorter prefix would need, so they are kept as they are at one length."""
    evicts = policy.prefill.evicts or policy.decode.evicts or policy.token_pruning.prunes
    has_windows = len(spec.compressible_layers) < spec.num_layers
    is_lossless = all(codec.lossless for codec in policy.codec.codecs)
    return "chunks" if is_lossless and not evicts and not has_windows else "snapshots"


def check_reuse(policy: Policy, spec: ModelSpec) -> None:
    stage = policy.prefill
    if stage.evicts and stage.score.needs.judges_by_end:
        raise PolicyError(
            f'policy "{policy.short}": score {term_of(stage.score).name} judges by the end of the prompt, and a stored '
            "prefix is compressed before its question is known; use a score that needs no end, such as kvzip or "
            "keydiff, or do not reuse prefixes"
        )
    if policy.token_pruning.prunes:
        raise PolicyError(
            f'policy "{policy.short}": {term_of(policy.token_pruning).name} judges by the end of the prompt, and a '
            "stored prefix is read before its question is known; use dense, or do not reuse prefixes"
        )
    if any(layer.rope is not None and layer.rope.depends_on_length for layer in spec.layers):
        raise ModelError(
            f"{spec.name} turns keys by angles that depend on the prompt's length, so a prefix of one prompt is none "
            "of another; do not reuse prefixes with it"
        )


def _rope_digest(spec: ModelSpec) -> str:
    return digest_text(repr([layer.rope for layer in spec.layers]))


def tokenizer_digest(tokenizer: Any) -> str:
    """Of what turns text into ids: a fast tokenizer's own description, else the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return digest_text(backend.to_str())
    return digest_text(repr(sorted(tokenizer.get_vocab().items())))
