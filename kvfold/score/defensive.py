"""`defensive`: the largest attention weight of the window, not the mean (DefensiveKV, arXiv:2510.13334).

An average over the window assumes that attention goes on as it was; a slot that mattered once and little on average is
lost by it. Here the largest weight counts, with a floor, times what the value becomes in attention's output.

    R rows   S slots   B sequences   G query heads per KV head   W queries of the window   X = G * W
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.critical import ranks
from kvfold.score.shared.attention import over_window
from kvfold.score.shared.checks import at_least, given
from kvfold.score.shared.output import output_norms
from kvfold.score.shared.positions import by_position
from kvfold.score.snapkv import window_start


@register(
    "score",
    "defensive",
    revision=2,
    paper="arXiv:2510.13334",
    cost="w·L·d; L·d·M",
    published="as published with `ada(floor=0)` or `global`",
)
@dataclass(frozen=True)
class Defensive(Scorer):
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
        at_least("defensive", "window", self.window, 1)
        if not 0 <= self.mass <= 1:
            raise PolicyError(f"defensive(mass={self.mass}): mass is a share of attention, from 0 to 1")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise PolicyError(f"defensive(kernel={self.kernel}): kernel must be odd, so that a slot is its own centre")

    @property
    def needs(self) -> Needs:
        return Needs(last_queries=self.window, output=True, size=True, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        q_position_RW = given("defensive", view.q_position_RW, "q_position_RW")
        in_window_RS = view.position_RS >= window_start(q_position_RW).unsqueeze(-1)
        before_RS = view.valid_RS & ~in_window_RS
        worst_RS, mean_RS = self._observed(view, q_position_RW, before_RS)
        floor_R1 = worst_RS.sum(-1, keepdim=True) / before_RS.sum(-1, keepdim=True).clamp(min=1)
        score_RS = worst_RS.maximum(floor_R1) * output_share(view)
        score_RS = score_RS.masked_fill(~before_RS, 0.0)
        top_B11 = score_RS.view(-1, view.num_heads * score_RS.shape[1]).amax(-1)[:, None, None]
        top_RS = top_B11.expand(-1, view.num_heads, score_RS.shape[1]).flatten(0, 1)
        score_RS = torch.where(self._sure(view, mean_RS, before_RS), top_RS, score_RS)
        return view.masked(score_RS.masked_fill(in_window_RS, torch.inf))

    def _observed(self, view: View, q_position_RW: Tensor, before_RS: Tensor) -> tuple[Tensor, Tensor]:
        """Largest pooled weight, and mean weight, over group and window: fp32 [R, S] each, 0 in the window."""
        q_RGWD = given("defensive", view.q_RGWD, "q_RGWD")
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
