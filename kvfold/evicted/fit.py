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

Targets are computed in tiles of queries, so that no more than a few hundred megabytes of scores exist at once. Heads of
a layer are solved in batches of similar length, with log-biases of -inf for padding: no query gives it any weight.

    | new, padded to M | sealed, padded to F |        B heads   N queries   S = M + F kept slots   D head dim
    H KV heads   G query heads per KV head   T query tokens
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.evicted.base import CalibrationTargets, Evicted, KeptSlots, Refit
from kvfold.evicted.least_squares import boxed_ridge, ridge
from kvfold.policy.registry import register
from kvfold.score.base import Needs, Replay, View

MOST_SCORES = 1 << 25  # at once, 128 MiB


def targets_of(view: View, q_HGTD: Tensor, position_T: Tensor) -> CalibrationTargets:
    """Every head's outputs to queries that see slots up to their own position."""
    position_N = position_T.repeat(q_HGTD.shape[1])
    q_HND, hidden_HS = q_HGTD.flatten(1, 2), ~view.valid_RS
    k_HSD, v_HSD = (x_HSD.masked_fill(hidden_HS.unsqueeze(-1), 0.0).float() for x_HSD in (view.k_RSD, view.v_RSD))
    bias_HS = torch.zeros_like(hidden_HS, dtype=torch.float32) if view.bias_RS is None else view.bias_RS
    bias_HS = bias_HS.masked_fill(hidden_HS, -torch.inf)
    step = max(1, MOST_SCORES // max(hidden_HS.numel(), 1))
    parts = []
    for q_HnD, position_n in zip(q_HND.split(step, dim=1), position_N.split(step), strict=True):
        score_HnS = scores(q_HnD, k_HSD, bias_HS, view.spec.scale, position_n, view.position_RS)
        lse_Hn = score_HnS.logsumexp(-1)
        parts.append((score_HnS.sub_(lse_Hn.unsqueeze(-1)).exp_() @ v_HSD, lse_Hn))
    out_HND, lse_HN = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
    return CalibrationTargets(q_HND, out_HND, lse_HN, torch.ones_like(lse_HN), view.spec.scale, position_N)


def scores(
    q_HND: Tensor, k_HSD: Tensor, bias_HS: Tensor, scale: float, position_N: Tensor | None, position_HS: Tensor
) -> Tensor:
    """Scaled scores with biases, fp32 [H, N, S]; -inf where a query does not see a slot."""
    score_HNS = (q_HND.float() @ k_HSD.float().mT).mul_(scale).add_(bias_HS.unsqueeze(1))
    if position_N is not None:
        score_HNS.masked_fill_(position_HS.unsqueeze(1) > position_N.unsqueeze(-1), -torch.inf)
    return score_HNS


_MOST_PADDING = 1.5  # the longest head of a batch over the shortest


@dataclass(frozen=True)
class Padded:
    """Kept slots of some heads: the first `num_new` columns to be encoded, the others as they are stored."""

    k_BSD: Tensor
    v_BSD: Tensor
    bias_BS: Tensor
    position_BS: Tensor
    num_new: int

    @classmethod
    def of(cls, heads: Sequence[KeptSlots]) -> Padded:
        parts = [(slice(slots.num_sealed, None), slice(slots.num_sealed)) for slots in heads]

        def joined(columns: Sequence[Tensor], padding: float = 0.0) -> Tensor:
            sides = ([column[part[i]] for column, part in zip(columns, parts, strict=True)] for i in (0, 1))
            return torch.cat([pad_sequence(side, batch_first=True, padding_value=padding) for side in sides], dim=1)

        return cls(
            joined([slots.k_SD for slots in heads]),
            joined([slots.v_SD for slots in heads]),
            joined([slots.bias_S for slots in heads], -torch.inf),
            joined([slots.position_S for slots in heads]),
            max(num_new(slots) for slots in heads),
        )


def weights(targets: CalibrationTargets, slots: Padded) -> Tensor:
    """fp32 [B, N, S]: the share of the whole cache's mass that each slot has. It is at most 1: they are part of it."""
    score_BNS = scores(targets.q_HND, slots.k_BSD, slots.bias_BS, targets.scale, targets.position_N, slots.position_BS)
    return score_BNS.sub_(targets.lse_HN.unsqueeze(-1)).exp_()


def num_new(slots: KeptSlots) -> int:
    return len(slots.k_SD) - slots.num_sealed


def batches(heads: Sequence[KeptSlots], most_slots: int) -> Iterator[list[int]]:
    """Indices of heads of similar length, those with new slots only; with its padding no batch of two or more exceeds
    `most_slots`."""
    batch: list[int] = []
    for head in sorted((i for i, slots in enumerate(heads) if num_new(slots)), key=lambda i: len(heads[i].k_SD)):
        length, shortest = len(heads[head].k_SD), len(heads[batch[0] if batch else head].k_SD)
        if length > _MOST_PADDING * shortest or (len(batch) + 1) * length > most_slots:
            yield from [batch] if batch else []
            batch = []
        batch.append(head)
    if batch:
        yield batch


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

    def refit(self, targets: CalibrationTargets, heads: Sequence[KeptSlots]) -> list[Refit]:
        found = super().refit(targets, heads)
        most_scores = MOST_SCORES if targets.q_HND.is_cuda else _CACHED_SCORES
        for batch in batches(heads, most_scores // max(targets.q_HND.shape[1], 1)):
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
