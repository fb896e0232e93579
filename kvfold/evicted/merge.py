"""`merge` and `d2o`: evicted slots are averaged into the kept slot whose key is nearest (D2O, arXiv:2406.13035).

`merge` is the rule as kvpress simplifies it (MergingPress). For evicted i and its nearest kept j by the cosine of keys:

    w_i  =  max(cos_ij, 0) * |v_i| / (|v_i| + |v_j|)          v_j  <-  (v_j + sum_i w_i v_i) / (1 + sum_i w_i)

Keys stay as they are, norms and sums use the values before merging, and slots whose cosine is below the threshold are
dropped. `d2o` averages keys too, as they are stored, at different positions:

    k_j  <-  (k_j + sum_i cos_i k_i) / (1 + n_j)         over the n_j evicted slots of j with cos_i >= mean of all cos
    v_j  <-  (v_j + sum_i cos_i v_i) / (1 + n_j)

Evicted slots with NaN or infinity are dropped by both: they would spoil the slot that takes them over.

    N slots of one head   E evicted   K kept   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from kvfold.errors import PolicyError
from kvfold.evicted.base import Evicted, Split
from kvfold.policy.registry import register

_CHUNK_ELEMENTS = 1 << 20  # of the similarity matrix, 4 MiB: E x K whole would be gigabytes on a long prompt


@register(
    "evicted", "merge", paper="arXiv:2406.13035", cost="E·K·d per head",
    published="differs: D2O as kvpress simplifies it",
)  # fmt: skip
@dataclass(frozen=True)
class Merge(Evicted):
    """Each evicted value is averaged into the kept slot with the nearest key, if their cosine reaches `threshold`."""

    threshold: float = 0.0  # cosine below which an evicted slot is dropped

    def __post_init__(self) -> None:
        if not -1.0 <= self.threshold <= 1.0:
            raise PolicyError(f"merge(threshold={self.threshold}) is no cosine; give a number from -1 to 1")

    def fold(self, split: Split) -> tuple[Tensor, Tensor]:
        k_KD, v_KD = split.k_ND[split.keep_N], split.v_ND[split.keep_N]
        evicted_N = ~split.keep_N & split.k_ND.isfinite().all(-1) & split.v_ND.isfinite().all(-1)
        if k_KD.shape[0] == 0:
            return k_KD, v_KD
        v_ED = split.v_ND[evicted_N].float()
        cos_E, nearest_E = nearest(split.k_ND[evicted_N], k_KD)
        weight_E = self._weights(cos_E, v_ED.norm(dim=-1), v_KD.float().norm(dim=-1)[nearest_E])
        total_KD = v_KD.float().index_add(0, nearest_E, weight_E.unsqueeze(-1) * v_ED)
        share_K = torch.ones_like(total_KD[:, 0]).index_add(0, nearest_E, weight_E)
        return k_KD, (total_KD / share_K.unsqueeze(-1)).to(v_KD.dtype)

    def _weights(self, cos_E: Tensor, norm_E: Tensor, norm_of_nearest_E: Tensor) -> Tensor:
        both_E = norm_E + norm_of_nearest_E
        share_E = norm_E / torch.where(both_E > 0, both_E, 1.0)
        return torch.where(cos_E >= self.threshold, cos_E.clamp(min=0) * share_E, 0.0)


def nearest(k_ED: Tensor, k_KD: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and index [E] of the kept key nearest to each evicted one, a few megabytes of cosines at a time."""
    # A kept key with NaN compares as the zero vector instead of being everybody's nearest.
    kept_DK = normalize(k_KD.float(), dim=-1).nan_to_num(nan=0.0).mT
    rows = max(1, _CHUNK_ELEMENTS // k_KD.shape[0])
    best = [(normalize(chunk.float(), dim=-1) @ kept_DK).max(dim=-1) for chunk in torch.split(k_ED, rows)]
    return torch.cat([b.values for b in best]), torch.cat([b.indices for b in best])


@register(
    "evicted", "d2o", paper="arXiv:2406.13035", cost="E·K·d per head",
    published="differs: heads decide apart, the threshold does not follow from step to step",
)  # fmt: skip
@dataclass(frozen=True)
class D2o(Evicted):
    """Evicted slots whose nearest kept key is nearer than average are averaged into it, keys and values; others go.

    Pair it with `h2o`, the method's score; its layer budgets, by the variance of attention, are not part of this term.

    Differences from the reference: a head decides by its own cosines, not by their mean over heads, and every round by
    its own average, where the reference lets the threshold follow with weight 1/2 from step to step.
    """

    def fold(self, split: Split) -> tuple[Tensor, Tensor]:
        k_KD, v_KD = split.k_ND[split.keep_N], split.v_ND[split.keep_N]
        evicted_N = ~split.keep_N & split.k_ND.isfinite().all(-1) & split.v_ND.isfinite().all(-1)
        if not len(k_KD):
            return k_KD, v_KD
        k_ED, v_ED = split.k_ND[evicted_N], split.v_ND[evicted_N]
        cos_E, nearest_E = nearest(k_ED, k_KD)
        near_E = (cos_E >= cos_E.mean()).float()
        count_K = torch.ones(len(k_KD), device=k_KD.device).index_add(0, nearest_E, near_E)
        weight_E1 = (near_E * cos_E).unsqueeze(-1)
        k_KD, v_KD = (
            (kept.float().index_add(0, nearest_E, weight_E1 * gone.float()) / count_K.unsqueeze(-1)).to(kept.dtype)
            for kept, gone in ((k_KD, k_ED), (v_KD, v_ED))
        )
        return k_KD, v_KD
