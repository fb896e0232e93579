"""`cam`: an evicted value is spread, by chance, over the slots that come after it (CaM, ICML 2024).

Attention that an evicted slot would have got goes to the slots that stay, so these take its value over: with
probability p_e, for the next `spread` kept slots j,

    p_e  =  min(1, A_e / mean A of the kept)        v_j  <-  v_j + v_e / spread

Keys are dropped. Chance is a hash of seed and position, so the same slot is merged on every device and in every batch.
Broken slots (NaN, infinity) are dropped.

    N slots of one head   E evicted   K kept   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.evicted.base import Evicted, Split
from kvfold.policy.registry import register
from kvfold.score.random import mix


@register(
    "evicted",
    "cam",
    cost="E·d per head",
    published="differs: merges all evicted slots at once, not one a step, which fails at the end of a prompt",
)
@dataclass(frozen=True)
class Cam(Evicted):
    """Evicted values are added to the next `spread` kept ones, the likelier the more attention they got.

    A is the policy's score, which must be one of attention. Differences from the reference: it evicts one slot a step
    and compares with the recent window, where a round here evicts many and compares with the kept slots that had to
    compete (a protected slot has no score); near the end a value is added to as many slots as follow.

    That difference makes it fail at the end of a prompt: the reference merges one value at a time, as tokens come,
    where here all evicted slots are merged at once. At 8x seven values meet for every one that stays; those just before
    the end, the question among them, take sums of many, and their own values drown: with the question known no needle
    was found in a quarter of the bytes (docs/results.md). Use it, if at all, with `every(...)` or an absolute size
    while decoding, where few slots go at a time.
    """

    spread: int = 32
    seed: int = 0

    weighs_attention: ClassVar[bool] = True

    def validate(self) -> str | None:
        return None if self.spread else "spread is at least 1, not 0; use drop to add values to no slot"

    def fold(self, split: Split) -> tuple[Tensor, Tensor]:
        k_KD, v_KD = split.k_ND[split.keep_N], split.v_ND[split.keep_N]
        evicted_N = ~split.keep_N & split.k_ND.isfinite().all(-1) & split.v_ND.isfinite().all(-1)
        if not len(k_KD):
            return k_KD, v_KD
        merged_N = evicted_N & self._drawn(split)
        next_E = split.keep_N.cumsum(0)[merged_N]  # among the kept, the first that follows
        return k_KD, (v_KD.double() + self._spread(split.v_ND[merged_N], next_E, len(v_KD))).to(v_KD.dtype)

    def _drawn(self, split: Split) -> Tensor:
        """bool [N]: the slots that chance picks, each with its probability."""
        assert split.score_N is not None
        judged_N = split.keep_N & split.score_N.isfinite()
        mean = split.score_N.masked_fill(~judged_N, 0.0).sum() / judged_N.sum().clamp(min=1)
        hash_N = mix(mix(torch.full_like(split.position_N, self.seed)) ^ split.position_N.to(torch.int64))
        return (hash_N >> 8).float() / 2**24 * mean < split.score_N

    def _spread(self, v_ED: Tensor, next_E: Tensor, num_kept: int) -> Tensor:
        """fp64 [K, D] to add: a value begins at its next slot and ends `spread` further on."""
        step_KD = torch.zeros(num_kept + 1, v_ED.shape[1], dtype=torch.float64, device=v_ED.device)
        share_ED = v_ED.double() / self.spread
        step_KD.index_add_(0, next_E, share_ED)
        step_KD.index_add_(0, (next_E + self.spread).clamp(max=num_kept), -share_ED)
        return step_KD.cumsum(0)[:-1]
