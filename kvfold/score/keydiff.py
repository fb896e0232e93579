"""`keydiff`: dissimilarity of a key to the mean key (KeyDiff, arXiv:2504.15364).

R rows   S slots   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.policy.registry import register
from kvfold.score.base import Scorer, View


@register(
    "score",
    "keydiff",
    paper="arXiv:2504.15364",
    cost="L·d",
    published="as published",
)
@dataclass(frozen=True)
class KeyDiff(Scorer):
    """Keep the keys least like the mean key.

    score = -cos(k, anchor), anchor = mean of k/|k| over the row's slots; post-RoPE keys, fp32. No queries, nothing
    always kept.

    As kvpress' KeyDiffPress on one row; padding takes no part in the anchor. The paper's blockwise form is this score
    with `between_chunks`.
    """

    def score(self, view: View) -> Tensor:
        unit_RSD = functional.normalize(view.k_RSD.float(), dim=-1).masked_fill(~view.valid_RS.unsqueeze(-1), 0.0)
        # The sum points where the mean does, and cosine does not see the length.
        anchor_RD = functional.normalize(unit_RSD.sum(dim=1), dim=-1)
        return view.masked(-torch.einsum("rsd,rd->rs", unit_RSD, anchor_RD))
