"""`rkv`: attention minus redundancy, the mean cosine of a key with the others (R-KV, arXiv:2505.24133).

R rows   S slots   D head dim   G query heads per KV head   W queries of the window   X slots of a tile
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.attention import dots, masked_softmax, row_blocks, window_start
from kvfold.score.base import View, WindowScorer

_TILE = 512  # rows of the similarity map that stand at a time


@register(
    "score", "rkv", revision=2, paper="arXiv:2505.24133", cost="L²·d, L memory",
    published="differs: a slot that resembles none leaves out nothing",
)  # fmt: skip
@dataclass(frozen=True)
class RKV(WindowScorer):
    """Keep what the last `window` queries attend to, less what other slots repeat.

    score = mix * I - (1 - mix) * U. Importance I = maxpool of the mean over the window of softmax(max over the group of
    q k^T * scale) over the slots before the window. Redundancy U = softmax over the slots of the mean cosine of a key
    with the others; each slot leaves out the latest one that it resembles by more than `threshold`, so that the latest
    of several repetitions is not held redundant. The window's own slots are +inf.

    window, kernel and mix are the authors' code's (the paper writes mix = 0.1). In that code a slot that resembles none
    leaves out its cosine with slot 0; here it leaves out nothing. It compresses while decoding: `every(128)` or an
    absolute size does so here. All pairs of slots are compared, which on a long prompt costs as much as attention.
    """

    window: int = 8
    kernel: int = 7
    mix: float = 0.07
    threshold: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("mix", self.mix), ("threshold", self.threshold)):
            if not 0 <= value <= 1:
                raise PolicyError(f"rkv({name}={value}): {name} must be from 0 to 1")

    def score(self, view: View) -> Tensor:
        q_RGWD, q_position_RW = view.window("rkv")
        in_window_RS = view.position_RS >= window_start(q_position_RW).unsqueeze(-1)
        blocks = row_blocks(len(q_RGWD), q_RGWD[0, ..., 0].numel() * view.k_RSD.shape[1])
        free_RS = view.valid_RS & ~in_window_RS
        vote_RS = torch.cat([_votes(view, q_RGWD[r], q_position_RW[r], free_RS[r], r) for r in blocks])
        important_RS = functional.max_pool1d(vote_RS, self.kernel, stride=1, padding=self.kernel // 2)
        redundant_RS = masked_softmax(mean_cosine(view.k_RSD, view.valid_RS, self.threshold), view.valid_RS)
        score_RS = self.mix * important_RS - (1 - self.mix) * redundant_RS
        return view.masked(score_RS.masked_fill(in_window_RS, torch.inf))


def _votes(view: View, q_RGWD: Tensor, q_position_RW: Tensor, free_RS: Tensor, rows: slice) -> Tensor:
    logit_RGWS = dots(q_RGWD, view.k_RSD[rows]) * view.spec.scale
    is_query_RW1 = (q_position_RW >= 0).unsqueeze(-1)
    weight_RWS = masked_softmax(logit_RGWS.amax(1), free_RS.unsqueeze(1) & is_query_RW1)
    return weight_RWS.sum(1) / is_query_RW1.sum(1)


def mean_cosine(k_RSD: Tensor, valid_RS: Tensor, threshold: float) -> Tensor:
    """Mean over a row's slots of their cosine with each slot, itself and the latest resembling one left out."""
    unit_RSD = functional.normalize(k_RSD.float(), dim=-1).masked_fill(~valid_RS.unsqueeze(-1), 0.0)
    total_RS = torch.einsum("rsd,rd->rs", unit_RSD, unit_RSD.sum(1)) - unit_RSD.square().sum(-1)
    slot_S = torch.arange(k_RSD.shape[1], device=k_RSD.device)
    for first in range(0, k_RSD.shape[1], _TILE):
        tile_RXS = unit_RSD[:, first : first + _TILE] @ unit_RSD.transpose(1, 2)
        is_self_XS = slot_S == slot_S[first : first + _TILE].unsqueeze(-1)
        alike_RXS = (tile_RXS > threshold) & ~is_self_XS
        latest_RX1 = torch.where(alike_RXS, slot_S, -1).amax(-1, keepdim=True)
        total_RS = total_RS - torch.where(slot_S == latest_RX1, tile_RXS, 0.0).sum(1)
    return total_RS / valid_RS.sum(-1, keepdim=True)
