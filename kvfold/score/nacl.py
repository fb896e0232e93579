"""`nacl`: attention of proxy tokens at the end of the prompt, and a randomly sampled share (NACL, arXiv:2408.03675).

Proxies at the end of the prompt give every candidate the same number of votes; sampling a share of the budget hedges
against their bias: what they do not look at now may be asked for later.

    R rows   S slots   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget.select import select_top
from kvfold.policy.registry import register
from kvfold.score.attention import window_start, window_sum
from kvfold.score.base import Needs, Scorer, View, given, share
from kvfold.score.baselines import Random

_ABOVE_ALL_SAMPLES = 1e4  # votes are at most the number of proxies, noise at most 17
_LEAST_DRAW = 2.0**-25  # half of the smallest draw above 0


@register(
    "score", "nacl", revision=2, paper="arXiv:2408.03675", cost="proxies·L·d",
    published="differs: a number of proxies, causal among themselves; `protect(sinks=256, recent=5%)` as published",
)  # fmt: skip
@dataclass(frozen=True)
class NACL(Scorer):
    """Keep what the last `proxies` queries attend to, and a random `share` of the budget beside it.

    s = sum over the proxies of softmax(q k^T * scale), mean over the group. Of the n slots that a head keeps beside the
    proxies and what is protected, (1 - share) * n are those of highest s; the others are drawn without replacement from
    softmax(s) of the rest, each head for itself: s + Gumbel noise, whose top k are such a sample for every k. Proxies
    and what is protected are +inf.

    Against the authors' code: there 12 % of the prompt go by votes, 7 % by chance (share = 0.37, the default), and 1 %,
    its first 256 tokens and the latest, is protected: `protect(sinks=256, recent=5%)`. The paper's ablation likes 0.7
    best. Proxies are 1 % of the prompt there and a number here, so that the window also works while decoding. There a
    proxy also sees those after it; here attention is causal, as the model's is. Noise is a hash of seed, layer, head
    and position, the same on every device.
    """

    proxies: int = 32
    share: float = 0.37
    seed: int = 0
    least = (("proxies", 1),)

    def __post_init__(self) -> None:
        super().__post_init__()
        share("nacl", "share", self.share, " of the budget left to chance")

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.proxies, size=True, protected=True, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD, q_position_RW = view.window("nacl")
        is_proxy_RS = view.position_RS >= window_start(q_position_RW).unsqueeze(-1)
        stays_RS = is_proxy_RS | given("nacl", view.protected_RS, "protected_RS")
        vote_RS = view.masked(window_sum(view, q_RGWD, q_position_RW).mean(1)).masked_fill(stays_RS, -torch.inf)
        free_R = (view.slots_per_head - (stays_RS & view.valid_RS).sum(-1)).clamp(min=0)
        safe_RS = select_top(vote_RS, ((1 - self.share) * free_R.double()).round())
        draw_RS = Random(self.seed).score(view).clamp(min=_LEAST_DRAW)
        gumbel_RS = -(-draw_RS.log()).log()
        score_RS = vote_RS + torch.where(safe_RS, _ABOVE_ALL_SAMPLES, gumbel_RS)
        return view.masked(score_RS.masked_fill(stays_RS, torch.inf))
