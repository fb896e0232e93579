"""`d2o`: evicted slots that resemble a kept one are averaged into it, keys and values (D2O, arXiv:2406.13035).

For evicted i and its nearest kept j by the cosine of keys:

    k_j  <-  (k_j + sum_i cos_i k_i) / (1 + n_j)         over the n_j evicted slots of j with cos_i >= mean of all cos
    v_j  <-  (v_j + sum_i cos_i v_i) / (1 + n_j)

Keys are averaged as they are stored, at different positions. Broken slots (NaN, infinity) are dropped.

    N slots of one head   E evicted   K kept   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.evicted.base import Evicted, Split
from kvfold.evicted.merge import nearest
from kvfold.policy.registry import register


@register(
    "evicted",
    "d2o",
    paper="arXiv:2406.13035",
    cost="E·K·d per head",
    published="differs: heads decide apart, the threshold does not follow from step to step",
)
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
