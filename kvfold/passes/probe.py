"""Attention of tokens that are read beside a prompt's held cache, and of which nothing stays.

    | stored | held |  read beside it: position `held.end` on

They attend to all that is stored and held, as any next token would, and to those read before them. What the cache
answered them is what a fitted cache has to answer too.

    H KV heads   G query heads per KV head   Q query heads   T queries   D head dim
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.attend.lse_merge import LseMerge
from kvfold.attend.paged import Stretch, plain, stretches
from kvfold.compress.full_prompt import FullPrompt
from kvfold.evicted.base import CalibrationTargets
from kvfold.passes.prefill import LayerBuffer, merge_new


class Answers(NamedTuple):
    """What the cache answered queries, and how much of their attention it had."""

    q_HGTD: Tensor
    out_HGTD: Tensor
    lse_HGT: Tensor
    share_HGT: Tensor


class ProbeAttention:
    """Queries of one layer: those of the last tokens of `buffer`, which holds all that was read beside the cache."""

    def __init__(self, held: FullPrompt, layer: int, q_HGTD: Tensor, buffer: LayerBuffer) -> None:
        spec = held.sequence.spec.layers[layer]
        offset = buffer.filled - q_HGTD.shape[2]
        self.q_HGTD = q_HGTD
        self._cache, self._own = LseMerge(q_HGTD), LseMerge(q_HGTD)
        self.stored = added(self._cache, stretches(held.sequence, layer, q_HGTD, held.end + offset), spec.scale)
        stored_HGT = self._cache.lse_HGT
        self.held = added(self._cache, _held(held, layer, q_HGTD, offset), spec.scale)
        merge_new(self._own, q_HGTD, buffer, offset, spec.scale, spec.sliding_window)
        own_HGT, cache_HGT = self._own.lse_HGT, self._cache.lse_HGT
        assert own_HGT is not None
        self._own_HGT = own_HGT
        self._cache_HGT = cache_HGT
        self.near_HGT = own_HGT if stored_HGT is None else torch.logaddexp(stored_HGT, own_HGT)  # all but what is held

    @property
    def whole_HGT(self) -> Tensor:
        """Log-sum-exp over everything."""
        assert self._cache_HGT is not None
        return torch.logaddexp(self._cache_HGT, self._own_HGT)

    @property
    def answers(self) -> Answers:
        """Read before `output`, of layers whose windows hold all."""
        assert self._cache_HGT is not None
        share_HGT = torch.sigmoid(self._cache_HGT - self._own_HGT)
        return Answers(self.q_HGTD, self._cache.result(), self._cache_HGT, share_HGT)

    def output(self) -> Tensor:
        """Attention to everything, [Q, T, D]."""
        self._cache.add(slice(0, len(self.q_HGTD)), self._own.result(), self._own_HGT)
        return self._cache.result().flatten(0, 1)


def grown(
    buffer: LayerBuffer | None, most_tokens: int, k_HTD: Tensor, v_HTD: Tensor, held: FullPrompt, dtype: torch.dtype
) -> LayerBuffer:
    """The buffer, or a new one for so many tokens, with the next tokens behind it, rounded as slots are."""
    found = LayerBuffer.empty(most_tokens, k_HTD, v_HTD, dtype) if buffer is None else buffer
    found.append(k_HTD.to(held.sequence.spec.kv_dtype), v_HTD.to(held.sequence.spec.kv_dtype))
    return found


def added(merge: LseMerge, parts: Iterable[Stretch], scale: float) -> list[Stretch]:
    """Merge attention to parts, and remember them."""
    found = list(parts)
    for part in found:
        merge.add(part.heads, *part.attend(scale))
    return found


def together(parts: Sequence[Answers], scale: float) -> CalibrationTargets:
    """The targets that `fit` reproduces."""
    q_HND, out_HND, lse_HN, share_HN = (torch.cat(column, dim=2).flatten(1, 2) for column in zip(*parts, strict=True))
    return CalibrationTargets(q_HND, out_HND, lse_HN, share_HN, scale)


def _held(held: FullPrompt, layer: int, q_HGTD: Tensor, offset: int) -> Iterator[Stretch]:
    window = held.sequence.spec.layers[layer].sliding_window
    reach = None if window is None else (window, held.end + offset)
    return plain(held.segment.layers[layer], q_HGTD, [0] * q_HGTD.shape[0], reach)
