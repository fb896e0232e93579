"""Probe passes (KVzip replay, self-study): queries attend to the uncompressed prompt cache and are not appended to it.

    | stored | full prompt |  probe: position `prompt.end` on

A probe token attends to everything stored, to the full prompt and to the probe tokens before it. The outputs of the
cache to probe queries are the calibration targets of `fit`.

    H KV heads   G query heads per KV head   Q query heads   T queries   D head dim
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.attend.lse_merge import LseMerge
from kvfold.attend.paged import KVPart, kv_parts, run_parts
from kvfold.compression.full_prompt import FullPrompt
from kvfold.evicted.base import CalibrationTargets
from kvfold.passes.prefill import LayerBuffer, merge_new


class Answers(NamedTuple):
    """Outputs of the cache to queries, and its share of their attention."""

    q_HGTD: Tensor
    out_HGTD: Tensor
    lse_HGT: Tensor
    share_HGT: Tensor


class ProbeAttention:
    """Queries of one layer: those of the last tokens of `buffer`, which holds all probe tokens so far."""

    def __init__(self, prompt: FullPrompt, layer: int, q_HGTD: Tensor, buffer: LayerBuffer) -> None:
        spec = prompt.sequence.spec.layers[layer]
        offset = buffer.filled - q_HGTD.shape[2]
        self.q_HGTD = q_HGTD
        self._cache, self._own = LseMerge(q_HGTD), LseMerge(q_HGTD)
        self.stored = added(self._cache, kv_parts(prompt.sequence, layer, q_HGTD, prompt.end + offset), spec.scale)
        stored_HGT = self._cache.lse_HGT
        self.prompt = added(self._cache, _prompt_parts(prompt, layer, q_HGTD, offset), spec.scale)
        merge_new(self._own, q_HGTD, buffer, offset, spec.scale, spec.sliding_window)
        own_HGT, cache_HGT = self._own.lse_HGT, self._cache.lse_HGT
        assert own_HGT is not None
        self._own_HGT = own_HGT
        self._cache_HGT = cache_HGT
        self.near_HGT = own_HGT if stored_HGT is None else torch.logaddexp(stored_HGT, own_HGT)  # all but the prompt

    @property
    def whole_HGT(self) -> Tensor:
        """Log-sum-exp over everything."""
        assert self._cache_HGT is not None
        return torch.logaddexp(self._cache_HGT, self._own_HGT)

    @property
    def answers(self) -> Answers:
        """Read before `output`; not of sliding-window layers."""
        assert self._cache_HGT is not None
        share_HGT = torch.sigmoid(self._cache_HGT - self._own_HGT)
        return Answers(self.q_HGTD, self._cache.result(), self._cache_HGT, share_HGT)

    def output(self) -> Tensor:
        """Attention to everything, [Q, T, D]."""
        self._cache.add(slice(0, len(self.q_HGTD)), self._own.result(), self._own_HGT)
        return self._cache.result().flatten(0, 1)


def grown(
    buffer: LayerBuffer | None, most_tokens: int, k_HTD: Tensor, v_HTD: Tensor, prompt: FullPrompt, dtype: torch.dtype
) -> LayerBuffer:
    """The buffer, or a new one for so many tokens, with the next tokens appended in the cache's dtype."""
    found = LayerBuffer.empty(most_tokens, k_HTD, v_HTD, dtype) if buffer is None else buffer
    found.append(k_HTD.to(prompt.sequence.spec.kv_dtype), v_HTD.to(prompt.sequence.spec.kv_dtype))
    return found


def added(merge: LseMerge, parts: Iterable[KVPart], scale: float) -> list[KVPart]:
    """Merge attention to parts; returns them as a list."""
    found = list(parts)
    for part in found:
        merge.add(part.heads, *part.attend(scale))
    return found


def joined_targets(parts: Sequence[Answers], scale: float) -> CalibrationTargets:
    """The targets that `fit` reproduces."""
    q_HND, out_HND, lse_HN, share_HN = (torch.cat(column, dim=2).flatten(1, 2) for column in zip(*parts, strict=True))
    return CalibrationTargets(q_HND, out_HND, lse_HN, share_HN, scale)


def _prompt_parts(prompt: FullPrompt, layer: int, q_HGTD: Tensor, offset: int) -> Iterator[KVPart]:
    window = prompt.sequence.spec.layers[layer].sliding_window
    reach = None if window is None else (window, prompt.end + offset)
    return run_parts(prompt.segment.layers[layer], q_HGTD, [0] * q_HGTD.shape[0], reach)
