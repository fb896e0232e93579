"""Token pruning during prefill: `dense` runs every token through every layer, `fastkv` prunes tokens in later layers.

Prompts run layer by layer, the hidden states of all tokens held in between, so tokens can be pruned between two layers.
Later layers neither compute their states nor store slots of them; kept tokens keep their positions.

    R rows (the KV heads of one sequence)   S slots, stored then new   T new tokens   K kept tokens
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvfold.policy.registry import Term, register
from kvfold.score.base import Needs, View
from kvfold.score.snapkv import SnapKV


class TokenPruning(Term):
    """A choice of the `prefill` axis. Without `prunes` no other method is called."""

    prunes: ClassVar[bool] = False

    @property
    def needs(self) -> Needs:
        """What `importance` looks at."""
        return Needs()

    def last_full_layer(self, num_layers: int) -> int:
        """The last layer that runs on all tokens, counted from 0."""
        raise NotImplementedError

    def scores_layer(self, layer: int, num_layers: int) -> bool:
        """Whether this layer scores tokens; the last full layer always does."""
        raise NotImplementedError

    def num_kept(self, num_tokens: int) -> int:
        """How many of so many new tokens are kept, if no more are protected."""
        raise NotImplementedError

    def importance(self, view: View) -> Tensor:
        """[R, S] of a scoring layer; the sum over rows and layers decides."""
        raise NotImplementedError


@register("prefill", "dense")
@dataclass(frozen=True)
class Dense(TokenPruning):
    """Every token runs through every layer."""


@register(
    "prefill",
    "fastkv",
    revision=2,
    paper="arXiv:2502.01068",
    cost="4·w·L·d; later layers run on `rate` of the prompt",
    published="as published with `fastkv(window=8, kernel=7, voters=1)`",
)
@dataclass(frozen=True)
class FastKV(TokenPruning):
    """From the middle of the model on, only the `rate` of a prompt's tokens that its end looks at run through layers.

    After layer `layer` (default: half of them have run) a token's importance is the attention of the last `window`
    queries, pooled over `kernel` neighbours, summed over all heads of the last `voters` layers. The most important
    ceil(rate * T) go on; the window, protected and pinned tokens, and as many of the last as the policy's score needs
    queries of, always do. The last token is among them. What each layer stores is the size's business, as ever.

    Differences from the reference, which is `fastkv(window=8, kernel=7, voters=1)` beside `snapkv(window=8, kernel=7,
    over_group=sum) + 10x`: the end of a prompt looks at a part of what an answer will need, so whole stretches of 33
    tokens are chosen; one layer may look elsewhere, so four vote; and the window holds a question. The window counts
    within the rate; the layer is named for three models there, half of the layers in each; a question that is read
    later (`ask`) runs whole.
    """

    rate: float = 0.2
    layer: int | None = None
    window: int = 32
    kernel: int = 33
    voters: int = 4

    prunes: ClassVar[bool] = True

    def validate(self) -> str | None:
        if not 0.0 < self.rate <= 1.0:
            return f"rate is the share of tokens that are kept, above 0 and at most 1, not {self.rate}"
        if self.window < 1:
            return f"window is at least 1, not {self.window}"
        if self.voters < 1:
            return f"voters is the number of layers that choose, at least 1, not {self.voters}"
        return None if self.kernel % 2 else f"kernel must be odd, so that a slot is its own centre, not {self.kernel}"

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window)

    def last_full_layer(self, num_layers: int) -> int:
        return num_layers // 2 - 1 if self.layer is None else self.layer

    def scores_layer(self, layer: int, num_layers: int) -> bool:
        return 0 <= self.last_full_layer(num_layers) - layer < self.voters

    def num_kept(self, num_tokens: int) -> int:
        return math.ceil(self.rate * num_tokens)

    def importance(self, view: View) -> Tensor:
        return SnapKV(self.window, self.kernel, over_group="sum").score(view)


def at_new_tokens(value_RS: Tensor, view: View, num_tokens: int) -> Tensor:
    """[R, T]: the values of the new tokens, which are the last slots of each row."""
    new_T = torch.arange(num_tokens, device=value_RS.device)
    return value_RS.gather(1, view.len_R.unsqueeze(-1) - num_tokens + new_T)


def kept_tokens(importance_T: Tensor, num_kept: int, protected_T: Tensor) -> Tensor:
    """The kept tokens, ascending [K]: protected ones, and the most important of the others."""
    total_T = importance_T.masked_fill(protected_T, torch.inf)
    count = max(num_kept, int(total_T.isinf().sum()))
    return total_T.topk(min(count, len(total_T))).indices.sort().values
