"""`lava_score`: attention of the last queries times the head's largest value norm (LAVa, arXiv:2509.09754).

Dropping a slot changes a layer's output by at most its weight times its value's norm; bounded by the head's largest
value, the factor is one for the whole head: it leaves the order inside a head and moves slots between heads.

    R rows   S slots
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.checks import at_least
from kvfold.score.snapkv import SnapKV


@register(
    "score",
    "lava_score",
    paper="arXiv:2509.09754",
    cost="w·L·d",
    published="as published with `lava`",
)
@dataclass(frozen=True)
class LavaScore(Scorer):
    """Keep what the last `window` queries attend to, times the head's largest |v|_1; LAVa is `lava_score + lava`.

    score = max over the group of maxpool(mean over the window of A), times max |v_j|_1 over the head's slots j before
    the window; A as in `snapkv`, pooling over `kernel` neighbours. The window's own slots are +inf.

    As the authors' code, defaults included. The factor is the same for all slots of a head, so `uniform` does not see
    it: pair the score with `lava`, which shares slots among layers by its entropy and among heads by its size.
    """

    window: int = 32
    kernel: int = 7

    def __post_init__(self) -> None:
        at_least("lava_score", "window", self.window, 1)
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise PolicyError(f"lava_score(kernel={self.kernel}): kernel must be odd, so that a slot is its own centre")

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        vote_RS = SnapKV(self.window, self.kernel, pool="max", over_group="max").score(view)
        before_RS = vote_RS.isfinite()
        size_RS = torch.linalg.vector_norm(view.v_RSD, 1, dim=-1, dtype=torch.float32)
        largest_R1 = size_RS.masked_fill(~before_RS, 0.0).amax(-1, keepdim=True)
        return torch.where(before_RS, vote_RS * largest_R1, vote_RS)
