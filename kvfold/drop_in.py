"""A compressed KV cache for `model.generate`, made ahead of it: any policy, also those that replay the prompt.

cache = kvfold.compress(model, tokenizer(document, return_tensors="pt"), "kvzip + global + 4x + int4")
model.generate(**tokenizer(document + question, return_tensors="pt"), past_key_values=copy.deepcopy(cache))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvfold.engine.layer_major import Progress
from kvfold.engine.runner import Runner
from kvfold.errors import InputError, PolicyError
from kvfold.models.attach import arena_of, attach, is_attached, module_of, spec_of
from kvfold.models.cache import Cache, first_real
from kvfold.models.check import check_policy, check_reads_ids
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
    left), token ids [batch, tokens], or the ids of one prompt. The last token is left for `generate` to read: give it
    the same tokens, or the same tokens followed by a question, which stays uncompressed. `copy.deepcopy(cache)` keeps
    the compressed context for the next question.
    """
    hf, policy, config = module_of(model), Policy.parse(policy), PageConfig(page_size, open_len)
    if not isinstance(hf, nn.Module):
        raise InputError(f"model is a transformers module or what kvfold.load returned, not {type(model).__name__}")
    check_reads_ids(policy)
    rows, num_tokens = _rows(inputs)
    if not is_attached(hf):
        attach(hf)
    spec = spec_of(model)
    check_policy(policy, spec)
    if policy.decode.may_evict and needs_sentences(policy):
        raise PolicyError(
            f'policy "{policy.short}" evicts by sentences while decoding, and model.generate tells a cache no token '
            "ids; use kvfold.Session, or a relative size such as 4x"
        )
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
    """Token ids of each row without padding and without its last token, and the length of such a padded batch."""
    if _is_text(inputs):
        raise InputError('inputs are token ids, not text; tokenize it first: tokenizer(text, return_tensors="pt")')
    given, mask = inputs, None
    if isinstance(inputs, Mapping):
        if "input_ids" not in inputs:
            raise InputError("inputs have no input_ids; give what a tokenizer returned, or token ids")
        given, mask = inputs["input_ids"], inputs.get("attention_mask")
    ids = _tensor("token ids", given)
    real = torch.ones_like(ids) if mask is None else _tensor("an attention mask", mask).to(ids.device)
    if ids.dim() != 2 or ids.shape[1] < 2 or not len(ids) or real.shape != ids.shape:
        shapes = f"not {list(ids.shape)}" if mask is None else f"not {list(ids.shape)} and {list(real.shape)}"
        raise InputError(f"inputs are token ids [batch, tokens], at least two tokens, with a mask alike, {shapes}")
    rows = [row[start:-1].tolist() for row, start in zip(ids, first_real(real != 0, least=2), strict=True)]
    return rows, ids.shape[1] - 1


def _is_text(inputs: Any) -> bool:
    return isinstance(inputs, str) or (isinstance(inputs, (list, tuple)) and any(isinstance(x, str) for x in inputs))


def _tensor(name: str, given: Any) -> Tensor:
    """Whole numbers [batch, tokens]; one row may come without its batch."""
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"inputs hold no {name}: rows must be whole numbers, all of one length; pad them") from error
    if found.is_floating_point() or found.is_complex() or (found.dtype == torch.bool and name == "token ids"):
        raise InputError(f"inputs: {name} are whole numbers, not {str(found.dtype).removeprefix('torch.')}")
    return found.unsqueeze(0) if found.dim() == 1 else found
