"""`fit`: values and log-biases of kept slots, fitted in closed form to the full cache (Attention Matching, 2602.16284).

Later tokens see a cache through two things: its output and its mass, by which it is weighed against what came after it.
Both are matched per KV head on calibration queries q_i, for which the whole cache gave output y_i and log-sum-exp l_i.
With s_ij = q_i.k_j * scale and x_ij = exp(s_ij - l_i), keys as they are:

    mass      w  =  argmin |C (X w - 1)|^2 + m |w - 1|^2      in [e^-limit, e^limit]; the log-bias of slot j is ln w_j
    values    V' =  argmin |C (P V' - Y)|^2 + m' |V' - V|^2   with P = softmax(s + ln w) over the kept slots

C is diagonal: a query counts by the share of its attention that the cache had, while the rest went to the reading it
was asked in. What the cache answers reaches it by this share; queries that look elsewhere would only blur what others
need. m and m' are `ridge` times the mean square of the columns of C X and C P. Slots that were sealed before keep their
codes and biases; the new ones make up for what they do not answer.

Heads of a layer are solved in batches of similar length.

    B heads   N queries   S kept slots, new ones first   M new ones   D head dim
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvfold.evicted.base import CalibrationTargets, Evicted, KeptSlots, Refit, Split
from kvfold.evicted.calibration_targets import MOST_SCORES
from kvfold.evicted.least_squares import boxed_ridge, ridge
from kvfold.evicted.ragged import Padded, batches, num_new, weights
from kvfold.policy.registry import register
from kvfold.score.base import Needs, Replay

_CACHED_SCORES = 1 << 18  # a CPU solves large heads one by one: a batch of them does not stay in its caches
_ANSWER = 96  # tokens of an answer in self-study
_LEAST_MASS = 1e-20  # of a query whose every slot went: its row is 0, not NaN


@register(
    "evicted",
    "fit",
    revision=3,
    paper="arXiv:2602.16284",
    cost="n·K·(d + min(n, K)) per head; replay: a second prefill",
    published="differs: ridge towards the original slots, keys are the score's",
)
@dataclass(frozen=True)
class Fit(Evicted):
    """Kept values and log-biases are solved for, so that queries get the outputs and the mass of the whole cache.

    Calibration queries are those of `tokens` tokens, all query heads of the group: evenly spaced ones of a second
    reading (`replay`), these and all of the model's own answers to questions about the text (`study`), or the last of
    the prompt (`prompt`), each seeing slots up to its own position.

    Against the authors' code: both steps are ridge regressions towards the original slots, not plain least squares, so
    fewer queries than slots do no harm; keys are those the score has chosen (`keys=score`, the one choice there is).
    """

    queries: Literal["replay", "study", "prompt"] = "replay"
    tokens: int = 2048
    ridge: float = 0.01
    limit: float = 3.0  # of a bias, either way
    keys: Literal["score"] = "score"

    folds: ClassVar[bool] = False
    has_bias: ClassVar[bool] = True

    def validate(self) -> str | None:
        if self.tokens < 1:
            return f"tokens is at least 1, not {self.tokens}"
        if not 0.0 < self.ridge < math.inf:
            return f"ridge is a number above 0, not {self.ridge}; 0.01 is the default"
        return None if 0.0 <= self.limit <= 30.0 else f"limit is a number from 0 to 30, not {self.limit}"

    @property
    def needs(self) -> Needs:
        if self.queries == "prompt":
            return Needs(last_queries=self.tokens, keeps_window=False, end_of_prompt=True)
        study = _ANSWER if self.queries == "study" else 0
        return Needs(replay=Replay(queries=self.tokens, study=study), end_of_prompt=True)

    def fold(self, split: Split) -> tuple[Tensor, Tensor]:
        """The choice may not be final yet."""
        return split.k_ND[split.keep_N], split.v_ND[split.keep_N]

    def refit(self, targets: CalibrationTargets, heads: Sequence[KeptSlots]) -> list[Refit]:
        found = super().refit(targets, heads)
        for batch in batches(heads, _most_scores(targets) // max(targets.q_HND.shape[1], 1)):
            for head, fitted in zip(batch, self._fitted(targets.of(batch), [heads[i] for i in batch]), strict=True):
                found[head] = fitted
        return found

    def _fitted(self, targets: CalibrationTargets, heads: Sequence[KeptSlots]) -> Iterator[Refit]:
        slots = Padded.of(heads)
        new, count_B = slice(slots.num_new), torch.tensor([num_new(head) for head in heads], device=slots.k_BSD.device)
        weight_BNS = weights(targets, slots)
        counts_BN1 = targets.share_HN.unsqueeze(-1)
        factor_BM = self._factors(weight_BNS * counts_BN1, targets.share_HN, slots.num_new, count_B)
        weight_BNS[..., new] *= factor_BM.unsqueeze(1).to(weight_BNS.dtype)
        share_BNS = weight_BNS / weight_BNS.sum(-1, keepdim=True).clamp(min=_LEAST_MASS)
        v_BSD = slots.v_BSD.float()
        missing_BND = (targets.out_HND - share_BNS @ v_BSD) * counts_BN1
        counted_BNM = share_BNS[..., new] * counts_BN1
        fitted_BMD = v_BSD[:, new] + ridge(counted_BNM, missing_BND, self.ridge, count_B).to(v_BSD.dtype)
        bias_BM = factor_BM.log().to(slots.bias_BS.dtype)
        for head, v_MD, bias_M in zip(heads, fitted_BMD.to(slots.v_BSD.dtype), bias_BM, strict=True):
            yield Refit(v_MD[: num_new(head)], bias_M[: num_new(head)])

    def _factors(self, weight_BNS: Tensor, whole_BN: Tensor, num_new: int, count_B: Tensor) -> Tensor:
        """By how much each new slot is to weigh more for the weights to add up to the whole, fp64."""
        missing_BN = whole_BN - weight_BNS[..., num_new:].sum(-1, dtype=torch.float64)
        low, high = math.exp(-self.limit), math.exp(self.limit)
        return boxed_ridge(weight_BNS[..., :num_new], missing_BN, self.ridge, count_B, low, high)


def _most_scores(targets: CalibrationTargets) -> int:
    return MOST_SCORES if targets.q_HND.is_cuda else _CACHED_SCORES
