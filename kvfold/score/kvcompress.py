"""`kvcompress`: squared attention weights of the window, summed (KV-Compress, arXiv:2410.00161).

R rows   S slots   G query heads per KV head   W queries of the window
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.attention import over_window
from kvfold.score.shared.checks import at_least, given
from kvfold.score.snapkv import window_start


@register(
    "score",
    "kvcompress",
    revision=2,
    paper="arXiv:2410.00161",
    cost="window·L·d",
    published="differs: squares of the last window alone, not of every step; budget `pages`",
)
@dataclass(frozen=True)
class KVCompress(Scorer):
    """Keep what the last `window` queries attend to, by the sum of squared weights.

    score = sum over the group of maxpool(sum over the window of A^2), A = softmax(q k^T * scale) over all slots, causal
    inside the window; pooling with `kernel` neighbours (1: off). The window's own slots are +inf.

    Against the authors' code: their metric lives on while decoding, adding the squares of every step, where here each
    eviction looks at the last `window` queries anew; a minimal distance between query and key is left out (their
    default is 0). They evict whole pages of all heads and layers, by the price of a page: that is the budget `pages`.
    """

    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        at_least("kvcompress", "window", self.window, 1)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise PolicyError(f"kvcompress(kernel={self.kernel}): kernel must be odd, so that a slot is its own centre")

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD = given("kvcompress", view.q_RGWD, "q_RGWD")
        q_position_RW = given("kvcompress", view.q_position_RW, "q_position_RW")
        in_window_RS = view.position_RS >= window_start(q_position_RW).unsqueeze(-1)
        vote_RGS = over_window(view, q_RGWD, q_position_RW, lambda weight_RGWS, _: weight_RGWS.square().sum(2))
        free_RGS = vote_RGS.masked_fill(in_window_RS.unsqueeze(1), 0.0)
        pooled_RGS = functional.max_pool1d(free_RGS, self.kernel, stride=1, padding=self.kernel // 2)
        return view.masked(pooled_RGS.sum(1).masked_fill(in_window_RS, torch.inf))
