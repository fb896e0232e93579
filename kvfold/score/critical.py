"""Weights times the norm of projected values: `critical` (CriticalKV, arXiv:2502.03805), `defensive` (DefensiveKV,
arXiv:2510.13334).

A slot that is evicted changes the output by its weight times what its value becomes in the output projection. In
`critical` half of the budget goes by weights alone, as they are sure; the other half by both. An average over the
window assumes that attention goes on as it was; in `defensive` the largest weight counts, with a floor, so that a slot
that mattered once and little on average is not lost.

    R rows   S slots   B sequences   G query heads per KV head   W queries of the window   X = G * W
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.errors import PolicyError
from kvfold.policy.registry import register, term_of
from kvfold.score.attention import by_position, output_norms, over_window, window_start
from kvfold.score.base import Needs, Scorer, View, WindowScorer, scored, share
from kvfold.score.snapkv import SnapKV

_SNAPKV = SnapKV()
_STEPS = 2**20


@register(
    "score", "critical", paper="arXiv:2502.03805", cost="cost of the inner score + L·d·M",
    published="differs: budgets over heads see the order of both stages",
)  # fmt: skip
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
    least = (("epsilon", 0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        share("critical", "first", self.first, " of the budget")
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
        inner_RS = scored(self.scorer, view)
        always_RS = inner_RS == torch.inf
        plain_RS = inner_RS.masked_fill(inner_RS.isinf(), 0.0)
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


@register(
    "score", "defensive", revision=2, paper="arXiv:2510.13334", cost="w·L·d; L·d·M",
    published="as published with `ada(floor=0)` or `global`",
)  # fmt: skip
@dataclass(frozen=True)
class Defensive(WindowScorer):
    """Keep what any of the last `window` queries attended to, by the weight of its value; pair it with `global`.

    Weights A of the window's queries on the slots before it are averaged over `kernel` neighbours, query by query, each
    row scaled back to its sum; m = maximum over group and window; score = max(m, mean of m over the slots) * n, with n
    the mean over the group of |v W_o|_1, divided by its sum over the heads at that token. Slots that hold the first
    `mass` of a row's mean attention, at most (L - window) * B / L - window for L slots of which B stay, come before all
    others of the layer. The window's own slots are +inf.

    As the authors' code: there too, the mass to be covered is less by what the `window` slots just before the window
    receive, on average over heads. Theirs runs with budgets over the heads of a layer (`ada(floor=0)`) or over all
    layers (`global`); prompts shorter than the window work here.
    """

    window: int = 32
    kernel: int = 5
    mass: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        share("defensive", "mass", self.mass, " of attention")

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window, output=True, size=True, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_RGWD, q_position_RW = view.window("defensive")
        in_window_RS = view.position_RS >= window_start(q_position_RW).unsqueeze(-1)
        before_RS = view.valid_RS & ~in_window_RS
        worst_RS, mean_RS = self._observed(view, q_RGWD, q_position_RW, before_RS)
        floor_R1 = worst_RS.sum(-1, keepdim=True) / before_RS.sum(-1, keepdim=True).clamp(min=1)
        score_RS = worst_RS.maximum(floor_R1) * output_share(view)
        score_RS = score_RS.masked_fill(~before_RS, 0.0)
        top_B11 = score_RS.view(-1, view.num_heads * score_RS.shape[1]).amax(-1)[:, None, None]
        top_RS = top_B11.expand(-1, view.num_heads, score_RS.shape[1]).flatten(0, 1)
        score_RS = torch.where(self._sure(view, mean_RS, before_RS), top_RS, score_RS)
        return view.masked(score_RS.masked_fill(in_window_RS, torch.inf))

    def _observed(self, view: View, q_RGWD: Tensor, q_position_RW: Tensor, before_RS: Tensor) -> tuple[Tensor, Tensor]:
        """Largest pooled weight, and mean weight, over group and window: fp32 [R, S] each, 0 in the window."""
        count_R = (q_position_RW >= 0).sum(-1)

        def both(weight_RGWS: Tensor, rows: slice) -> Tensor:
            outside_R1S = ~before_RS[rows].unsqueeze(1)
            weight_RXS = weight_RGWS.flatten(1, 2).masked_fill(outside_R1S, 0.0)
            mean_RS = weight_RXS.sum(1) / (count_R[rows] * q_RGWD.shape[1]).unsqueeze(-1)
            return torch.stack((self._pooled(weight_RXS, outside_R1S).amax(1), mean_RS), dim=1)

        found_R2S = over_window(view, q_RGWD, q_position_RW, both)
        return found_R2S[:, 0], found_R2S[:, 1]

    def _pooled(self, weight_RXS: Tensor, outside_R1S: Tensor) -> Tensor:
        """Averages over neighbours, query by query, with the sum each query had."""
        pooled_RXS = functional.avg_pool1d(weight_RXS, self.kernel, stride=1, padding=self.kernel // 2)
        pooled_RXS = pooled_RXS.masked_fill(outside_R1S, 0.0)
        return pooled_RXS * (weight_RXS.sum(-1, keepdim=True) / pooled_RXS.sum(-1, keepdim=True).clamp(min=1e-30))

    def _sure(self, view: View, mean_RS: Tensor, before_RS: Tensor) -> Tensor:
        """bool [R, S]: the slots of largest mean weight, up to but without the one that reaches the mass."""
        num_before_R1 = before_RS.sum(-1, keepdim=True)
        late_RS = before_RS & (torch.arange(before_RS.shape[1], device=before_RS.device) >= num_before_R1 - self.window)
        bias_B = mean_RS.masked_fill(~late_RS, 0.0).sum(-1).view(-1, view.num_heads).mean(-1)
        wanted_R1 = self.mass - bias_B.repeat_interleave(view.num_heads).unsqueeze(-1)
        share_RS = mean_RS / mean_RS.sum(-1, keepdim=True).clamp(min=1e-30)
        covered_RS = share_RS.sort(dim=-1, descending=True, stable=True).values.cumsum(-1)
        count_R1 = (covered_RS < wanted_R1).sum(-1, keepdim=True)
        # The authors' cap: their length is already without the window, which is then taken off once more.
        most_R1 = num_before_R1 * view.slots_per_head // view.len_R.clamp(min=1).unsqueeze(-1) - self.window
        return before_RS & (ranks(share_RS) < count_R1.minimum(most_R1.clamp(min=0)))


def output_share(view: View) -> Tensor:
    """fp32 [R, S]: |v W_o|_1, averaged over the group, as a share of the sum over the heads that hold the token."""
    norm_RS = output_norms("defensive", view, 1).mean(1)
    norm_RP = by_position(norm_RS, view, 0.0)
    total_BP = norm_RP.view(-1, view.num_heads, norm_RP.shape[1]).sum(1)
    total_RS = total_BP.repeat_interleave(view.num_heads, dim=0).gather(1, view.position_RS)
    return norm_RS / total_RS.clamp(min=1e-30)
