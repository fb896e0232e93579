"""`critical`: attention weights times the norm of projected values (CriticalKV, arXiv:2502.03805).

A slot that is evicted changes the output by its weight times what its value becomes in the output projection. Half of
the budget goes by weights alone, as they are sure; the other half by both.

    R rows   S slots   G query heads per KV head
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.policy.registry import register, term_of
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.checks import at_least
from kvfold.score.shared.output import output_norms
from kvfold.score.snapkv import SnapKV

_SNAPKV = SnapKV()
_STEPS = 2**20


@register(
    "score",
    "critical",
    paper="arXiv:2502.03805",
    cost="that of its score; L·d·M",
    published="differs: budgets over heads see the order of both stages",
)
@dataclass(frozen=True)
class Critical(Scorer):
    """Keep what another score likes best, then what it likes and whose values weigh most in attention's output.

    With a the inner score and B the slots a head keeps on average: the `first` * B slots of largest a come first, in
    their order, then the others by (a + epsilon) * mean over the group of |v W_o|_1. What the inner score always keeps
    (+inf) stays so, and counts among the first. Meant for scores that are weights: snapkv, h2o, kvzip.

    As kvpress' CriticalKVPress, defaults included; its CriticalAdaKVPress shares the budget out by a before the two
    stages, here budgets over heads see the two stages' order, so that each head is sure of its first stage.
    """

    scorer: Scorer = _SNAPKV
    first: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        at_least("critical", "epsilon", self.epsilon, 0)
        if not 0 <= self.first <= 1:
            raise PolicyError(f"critical(first={self.first}): first is a share of the budget, from 0 to 1")
        if self.scorer.keeps_all:
            inner = term_of(self.scorer).name
            raise PolicyError(f"critical({inner}): the inner score keeps everything; name one that evicts")

    @property
    def needs(self) -> Needs:
        return replace(self.scorer.needs, output=True, size=True)

    @property
    def default_prefill_trigger(self) -> str:
        return self.scorer.default_prefill_trigger

    def score(self, view: View) -> Tensor:
        inner_RS = view.masked(self.scorer.score(view))
        always_RS = inner_RS == torch.inf
        plain_RS = inner_RS.masked_fill(~inner_RS.isfinite(), 0.0)
        second_RS = (plain_RS + self.epsilon) * output_norms("critical", view, 1).mean(1)
        rank_RS = ranks(inner_RS)
        # Above everything of the second stage, and still in the order of the inner score: fp32 tells these apart.
        top_R1 = second_RS.masked_fill(~view.valid_RS, 0.0).abs().amax(-1, keepdim=True).clamp(min=1e-30)
        first_RS = top_R1 * (2 - rank_RS.clamp(max=_STEPS) / _STEPS)
        score_RS = torch.where(rank_RS < int(self.first * view.slots_per_head), first_RS, second_RS)
        return view.masked(score_RS.masked_fill(always_RS, torch.inf))


def ranks(score_RS: Tensor) -> Tensor:
    """int64 [R, S]: 0 for a row's highest score; equal ones by index."""
    order_RS = score_RS.sort(dim=-1, descending=True, stable=True).indices
    place_S = torch.arange(score_RS.shape[-1], device=score_RS.device)
    return torch.empty_like(order_RS).scatter_(1, order_RS, place_S.expand_as(order_RS))
