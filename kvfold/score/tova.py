"""`tova`: attention of the last query, averaged over all heads of a layer (TOVA, arXiv:2401.06104).

R rows   S slots   D head dim   G query heads per KV head   B sequences   H KV heads   P positions
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.attention import window_attention
from kvfold.score.shared.checks import given


@register(
    "score",
    "tova",
    revision=2,
    paper="arXiv:2401.06104",
    cost="L·d",
    published="as published in kvpress: the last token stays",
)
@dataclass(frozen=True)
class TOVA(Scorer):
    """Keep what the last query attends to, on average over all heads of the layer.

    score = mean over all query heads of softmax(q k^T * scale) of the last query; every head of a sequence gets the
    same scores. The last token itself is +inf.

    As kvpress' TOVAPress. The authors' code does not force the last token and evicts at every step. Votes meet by
    position, so heads that hold different slots still vote on the same tokens (a slot a head lost gets 0 from it).
    """

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=1, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD = given("tova", view.q_RGWD, "q_RGWD")[:, :, -1:]
        q_position_RW = given("tova", view.q_position_RW, "q_position_RW")[:, -1:]
        vote_RS = window_attention(view, q_RGWD, q_position_RW).squeeze(2).mean(dim=1)
        shared_RS = mean_over_heads(vote_RS, view.position_RS, view.num_heads)
        return view.masked(shared_RS.masked_fill(view.position_RS == q_position_RW, torch.inf))


def mean_over_heads(vote_RS: Tensor, position_RS: Tensor, num_heads: int) -> Tensor:
    """Votes averaged over the heads of each sequence, token by token. Padding brings 0 to position 0."""
    by_sequence = (-1, num_heads, vote_RS.shape[-1])
    vote_BHS, position_BHS = vote_RS.reshape(by_sequence), position_RS.reshape(by_sequence)
    total_BP = vote_RS.new_zeros(vote_BHS.shape[0], int(position_RS.max()) + 1)
    for head in range(num_heads):  # one head at a time: no two slots of a head share a position, so the order is fixed
        total_BP.scatter_add_(1, position_BHS[:, head], vote_BHS[:, head])
    total_BHP = total_BP.unsqueeze(1).expand(-1, num_heads, -1)
    return (total_BHP.gather(2, position_BHS) / num_heads).flatten(0, 1)
