"""Pack a document: prefill it, keep n slots in every head, rotate the keys, write one entry.

An engine such as vLLM gives a sequence whole blocks of one length for all heads and layers, and its attention has no
bias per slot. What cannot be held so is refused by name: budgets that differ between heads or layers, codecs, fitted
biases (these three are for ragged entries), recalled slots, shifted positions, sliding windows, positions that are not
rotary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from torch import Tensor, stack

from kvfold.engine.layer_major import Progress
from kvfold.errors import FileError, InputError, ModelError, PolicyError
from kvfold.models.digest import weights_digest
from kvfold.models.loader import Model
from kvfold.models.pull.pull import resolve
from kvfold.packed.client import PackedPrefix
from kvfold.packed.entry import (
    TTL_S,
    packed_binding,
    packed_blocks,
    packed_key,
    rope_digest,
    rotate_keys,
)
from kvfold.packed.ragged import ragged_content
from kvfold.pages.page_config import PageConfig
from kvfold.pages.read import stored_slots
from kvfold.policy.policy import Policy
from kvfold.policy.registry import term_of
from kvfold.policy.size import SizeFacts, Tokens
from kvfold.session import Session
from kvfold.store.entry.format import encode, signer_of
from kvfold.store.store import check_reuse
from kvfold.store.tiers.base import ByteTier
from kvfold.store.tiers.eviction import Lease

BLOCK_SIZE = 128  # a multiple of what engines use: 16 on GPUs, 128 on CPUs


def pack(
    model: Model,
    text: str | Sequence[int],
    policy: str | Policy,
    tier: ByteTier,
    *,
    block_size: int = BLOCK_SIZE,
    ragged: bool = False,
    secret: bytes = b"",
    progress: Progress | None = None,
) -> PackedPrefix:
    """Compress a document, a text or token ids, into an entry of the tier. The size of the policy is rounded up to
    whole blocks.

    `ragged` takes codecs, and policies whose heads differ in length, for an engine with kvfold's attention backend.
    """
    policy = Policy.parse(policy)
    check_packable(model, policy, ragged=ragged)
    weights = weights_digest(checkpoint_folder(model))
    with Session(model) as probe:
        num_tokens = len(probe.conversation.text_ids(text, "start", []) if isinstance(text, str) else text)
    sized = _undecoded(policy) if ragged else in_blocks(policy, num_tokens, block_size)
    vocab_size = min(model.spec.vocab_size, len(model.tokenizer))
    with Session(model, sized) as session:
        session.extend(text, progress=progress)
        has_template = isinstance(text, str) and session.template is not None
        form, slack = "", 0
        if ragged:
            found = ragged_content(session, vocab_size, block_size)
            form, num_slots, slack, blocks = found.format.text, found.num_slots, found.slack_bytes, found.blocks
        else:
            layers = list(_rows(session))
            num_slots, blocks = len(layers[0][0]), packed_blocks(num_tokens, vocab_size, layers)
    rope = rope_digest(model.hf.config.get_text_config())
    binding = packed_binding(weights, model.spec.dtype, rope, sized.fingerprint, signer_of(secret), ragged=form)
    key = packed_key(binding, num_slots, blocks)
    lease = Lease(time.time(), TTL_S, 0.0)
    data = encode(key, binding, blocks, lease, secret)
    if not tier.put(key, data, lease):
        raise FileError(f"the entry ({len(data)} bytes) could not be stored; choose another store, or make room there")
    return PackedPrefix(
        entry=key.text,
        num_slots=key.num_tokens,
        num_tokens=num_tokens,
        vocab_size=vocab_size,
        num_bytes=len(data),
        model=model.name,
        dtype=str(model.spec.dtype).removeprefix("torch."),
        policy=sized.short,
        has_template=has_template,
        is_ragged=ragged,
        slack_bytes=slack,
    )


def checkpoint_folder(model: Model) -> Path:
    """Where the weights lie that an engine reads too."""
    found = Path(resolve(model.name))
    if found.is_dir():
        return found
    from huggingface_hub import snapshot_download  # here: names of the catalogue and folders come without it

    return Path(snapshot_download(model.name, local_files_only=True))


def check_packable(model: Model, policy: Policy, *, ragged: bool = False) -> None:
    """ModelError or PolicyError names what the blocks of an engine cannot hold."""
    for reason in _model_reasons(model):
        raise ModelError(f"{model.name} {reason}")
    check_reuse(policy, model.spec)
    check_policy_packable(policy, ragged=ragged)


def check_policy_packable(policy: Policy, *, ragged: bool = False) -> None:
    """PolicyError names what the blocks of an engine cannot hold, of any model."""
    reasons = chain(_common_reasons(policy), _ragged_reasons(policy) if ragged else _even_reasons(policy))
    for reason in reasons:
        raise PolicyError(f'policy "{policy.short}" {reason}')


def _model_reasons(model: Model) -> Iterator[str]:
    spec = model.spec
    if spec.kv_dtype != spec.dtype:
        names = [str(dtype).removeprefix("torch.") for dtype in (spec.dtype, spec.kv_dtype)]
        yield f"computes in {names[0]} and keeps its KV cache in {names[1]}; give one --dtype, the one that vLLM runs"
    if any(not layer.compressible for layer in spec.layers):
        yield "has sliding-window layers, whose windows count tokens that are no longer there; use another model"
    if any(layer.rope is None for layer in spec.layers):
        yield "has no rotary positions, so its keys cannot be moved; use another model"
    if "mrope_section" in (getattr(model.hf.config.get_text_config(), "rope_parameters", None) or {}):
        yield "has positions in three dimensions (M-RoPE), which one shift does not move; use another model"


def _common_reasons(policy: Policy) -> Iterator[str]:
    if not policy.prefill.evicts:
        yield 'evicts nothing; write for example "keydiff + uniform + 4x"'
    if policy.recall is not None:
        yield "recalls evicted slots, which an engine does not; leave recall out"
    if policy.position.shifts:
        yield "closes up positions (slot), and an engine keeps those of its prompt; leave slot out"
    if policy.attend.selects:
        yield f"reads selected slots ({term_of(policy.attend).name}), and an engine reads all; leave it out"
    if policy.shorten is not None:
        yield "shortens the text; run kvfold shorten first, and pack what it prints"


def _ragged_reasons(policy: Policy) -> Iterator[str]:
    """What pages inside an engine's blocks cannot hold."""
    for codec in policy.codec.codecs:
        if codec.kernel is None:
            yield f"stores slots that are not read by themselves ({term_of(codec).name}); use int4, int8, fp8 or kivi4"


def _even_reasons(policy: Policy) -> Iterator[str]:
    """What blocks of one length for all heads, in the engine's KV dtype, cannot hold."""
    stage = policy.prefill
    if any(not codec.lossless for codec in policy.codec.codecs):
        yield "quantises slots, and the engine's blocks have its own KV dtype; leave the codec out, or use --ragged"
    if not stage.budget.is_even:
        name = term_of(stage.budget).name
        yield f"gives heads or layers different lengths ({name}), and an engine's blocks have one; use uniform"
    if stage.evicted.has_bias:
        name = term_of(stage.evicted).name
        yield f"gives slots a bias ({name}), which an engine's attention does not read; use drop"
    if stage.size is not None and stage.size.counts_bytes:
        yield f"has a size in bytes ({stage.size}); write a ratio such as 4x, or slots such as 512tok"


def in_blocks(policy: Policy, num_tokens: int, block_size: int) -> Policy:
    """The policy with a size that leaves whole blocks, and without eviction while decoding, which is the engine's."""
    assert policy.prefill.size is not None
    if block_size < 1:
        raise InputError(f"block_size is {block_size}; give the engine's, such as 16 or 128")
    wanted = policy.prefill.size.slots_per_head(SizeFacts(num_tokens, 1, 1.0, 0, 0, 0))
    num_slots = -(-max(1, wanted) // block_size) * block_size
    if num_slots + PageConfig.open_len >= num_tokens:
        raise InputError(
            f"the document has {num_tokens} tokens, and {policy.prefill.size} in blocks of {block_size} keeps "
            f"{num_slots}, which saves nothing; pack a longer document, or give a higher ratio or smaller blocks"
        )
    stage = replace(policy.prefill, size=Tokens(num_slots + PageConfig.open_len))
    return _undecoded(replace(policy, prefill=stage))


def _undecoded(policy: Policy) -> Policy:
    """Without eviction while decoding, which is the engine's."""
    return replace(policy, decode=Policy.parse("full").decode)


def _rows(session: Session) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys, rotated, and values [n, H, D] of every layer."""
    cache, spec = session.cache, session.model.spec
    for index, layer in enumerate(spec.layers):
        slots = stored_slots(cache, index, spec.kv_dtype)
        if len(set(slots.lens)) != 1 or cache.open.fill:
            found = f"heads of {min(slots.lens)} to {max(slots.lens)} slots"
            raise PolicyError(f'policy "{session.policy.short}" left {found}, and an engine\'s blocks have one length')
        assert layer.rope is not None
        k_nHD, v_nHD = stack(slots.k, 1).cpu(), stack(slots.v, 1).cpu()
        yield rotate_keys(layer.rope, k_nHD, len(session.token_ids), len(k_nHD)), v_nHD
