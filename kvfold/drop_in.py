"""A compressed KV cache for `model.generate`, made ahead of it: any policy, also those that replay the prompt.

    cache = kvfold.compress(model, tokenizer(document, return_tensors="pt"), "kvzip + global + 4x + int4")
    model.generate(**tokenizer(document + question, return_tensors="pt"), past_key_values=copy.deepcopy(cache))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvfold.engine.layer_major import Progress
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, PolicyError
from kvfold.models.attach import arena_of, attach, is_attached, module_of, spec_of
from kvfold.models.cache import Cache
from kvfold.models.check import check_policy
from kvfold.models.sentences import needs_sentences
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy


def compress(
    model: Any,
    inputs: Tensor | Mapping[str, Any] | Sequence[int],
    policy: str | Policy,
    *,
    page_size: int = PageConfig.page_size,
    open_len: int = PageConfig.open_len,
    progress: Progress | None = None,
) -> Cache:
    """Prefill `inputs` and compress them: a cache for `model.generate(..., past_key_values=cache)`, under any policy.

    `model` is a transformers module or what `kvfold.load` returned; `inputs` what a tokenizer returned (padded on the
    left), token ids [batch, tokens], or the ids of one prompt. Give `generate` the same tokens followed by new ones,
    which it alone reads and keeps; `copy.deepcopy(cache)` keeps the compressed context for the next question.
    """
    hf, policy, config = module_of(model), Policy.parse(policy), PageConfig(page_size, open_len)
    if not is_attached(hf):
        attach(hf)
    spec = spec_of(model)
    check_policy(policy, spec)
    if policy.decode.may_evict and needs_sentences(policy):
        raise PolicyError(
            f'policy "{policy.short}" evicts by sentences while decoding, and model.generate tells a cache no token '
            "ids; use kvfold.Session, or a relative size such as 4x"
        )
    rows, num_tokens = _rows(inputs)
    runner = Runner(hf, spec, arena_of(hf), compile="auto" if hf is model else model.compile)
    sequences: list[SequenceCache] = []
    try:
        for _ in rows:
            sequences.append(runner.new_sequence(policy, config))
        runner.prefill(sequences, rows, progress=progress)
        return Cache.filled(model, policy, config, sequences, num_tokens)
    except BaseException:
        for sequence in sequences:
            sequence.release()
        raise


def _rows(inputs: Tensor | Mapping[str, Any] | Sequence[int]) -> tuple[list[list[int]], int]:
    """Token ids of each row without padding, and the length of the padded batch."""
    given = inputs["input_ids"] if isinstance(inputs, Mapping) else inputs
    ids = torch.as_tensor(given)
    ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
    if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
        raise InputError(f"inputs are token ids [batch, tokens], at least one of each, not {list(ids.shape)}")
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool().to(ids.device)
    starts = (~real).sum(-1)
    ordered = real == (torch.arange(ids.shape[1], device=ids.device) >= starts.unsqueeze(-1))
    if not bool(ordered.all()) or bool((starts == ids.shape[1]).any()):
        raise InputError("padding must be on the left, and every row needs a token; set tokenizer.padding_side='left'")
    rows = [row[start:].tolist() for row, start in zip(ids, starts.tolist(), strict=True)]
    return rows, ids.shape[1]
