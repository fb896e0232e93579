"""Sampling: greedy, or temperature with top-k and top-p and a seed.

Every accepted temperature and top_p gives finite probabilities: the largest logit is subtracted before the division,
and the argmax token is never cut off. Logits whose maximum is NaN or infinite raise LogitsError.

    V vocabulary   T rows of one request   N rows   M rows that are drawn
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.errors import InputError, LogitsError
from kvfold.pages.async_copy import upload

NO_TOKEN = -1  # in place of the argmax token of a row whose largest logit is not finite
_FLAT = 1e37  # a temperature at which all tokens are equally likely; its inverse is greedy


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise InputError(f"temperature is {self.temperature}; it must be 0 (greedy) or above, and finite")
        if self.top_k < 0:
            raise InputError(f"top_k is {self.top_k}; it must be 0 (off) or above")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}; it must be above 0 and at most 1")

    @property
    def is_drawn(self) -> bool:
        """Else it is the argmax."""
        return self.temperature > 0

    @property
    def is_cut(self) -> bool:
        """Whether some tokens are never drawn."""
        return self.top_k > 0 or self.top_p < 1


class Sampler:
    """Draws by a generator of its own on the CPU, so a seed gives the same tokens in any batch."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)
        self._uniform: float | None = None

    def pick(self, logits_V: Tensor) -> int:
        """LogitsError if the largest logit is not finite."""
        (found,) = next_tokens(logits_V.unsqueeze(0), [self])
        return checked(found)

    def picks(self, logits_TV: Tensor, greedy: Sequence[int] | None = None) -> Iterator[int]:
        """A token for each row, drawn lazily. `greedy`: the argmax of each row, where it is known."""
        if self.sampling.temperature == 0:
            yield from map(checked, greedy_tokens(logits_TV).tolist() if greedy is None else greedy)
        else:
            yield from map(self.pick, logits_TV)

    def uniform(self) -> float:
        """From 0 to below 1; the same number until a token is drawn, so that a draw that raised can be repeated."""
        if self._uniform is None:
            self._uniform = float(torch.rand((), generator=self.generator, dtype=torch.float64))
        return self._uniform

    def has_drawn(self) -> None:
        self._uniform = None


def next_tokens(logits_NV: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The token of each row, argmax or drawn, or NO_TOKEN; chosen on the device, so the host reads all rows at once."""
    token_N = greedy_tokens(logits_NV)
    is_finite_N = token_N != NO_TOKEN
    for is_cut in (False, True):  # apart, or a draw would depend on who else is in the batch
        rows = [row for row, one in enumerate(samplers) if one.sampling.is_drawn and one.sampling.is_cut == is_cut]
        if rows:
            row_M = upload(rows, logits_NV.device)
            drawn_M = _drawn(logits_NV.index_select(0, row_M).float(), [samplers[row] for row in rows], is_cut)
            token_N = token_N.index_copy(0, row_M, drawn_M)
    found: list[int] = token_N.where(is_finite_N, NO_TOKEN).tolist()
    for sampler in samplers:
        sampler.has_drawn()
    return found


def _drawn(logits_MV: Tensor, samplers: Sequence[Sampler], is_cut: bool) -> Tensor:
    """By the inverse of the cumulative distribution, over tokens as they are or, where some are cut, by likelihood."""
    given = [sampler.sampling for sampler in samplers]
    # In 32 bits smaller temperatures are 0 and larger ones infinite, and 0 / 0 and inf / inf are no numbers.
    temperature_M = [min(max(one.temperature, 1 / _FLAT), _FLAT) for one in given]
    scaled_MV = (logits_MV - logits_MV.amax(-1, keepdim=True)) / _column(temperature_M, logits_MV)
    index_MV = None
    if is_cut:
        scaled_MV, index_MV = scaled_MV.sort(descending=True, stable=True)
        probs_MV = _cut(scaled_MV, given)
    else:
        probs_MV = torch.softmax(scaled_MV, dim=-1)
    upto_MV = probs_MV.double().cumsum(-1)
    total_M1 = upto_MV[:, -1:]
    at_M1 = torch.searchsorted(upto_MV, total_M1 * _column([one.uniform() for one in samplers], upto_MV), right=True)
    last_M1 = (upto_MV >= total_M1).int().argmax(-1, keepdim=True)  # the last token that is not cut
    at_M1 = torch.minimum(at_M1, last_M1)
    return (at_M1 if index_MV is None else index_MV.gather(-1, at_M1)).squeeze(-1)


def _cut(ordered_MV: Tensor, given: Sequence[Sampling]) -> Tensor:
    """Probabilities of tokens by falling likelihood, 0 beyond top_k and top_p. Of equally likely ones the first stay,
    as with argmax; the likeliest always does, since a share may be 0 in 32 bits."""
    rank_V = torch.arange(ordered_MV.shape[1], device=ordered_MV.device)
    most_M1 = _column([one.top_k or len(rank_V) for one in given], rank_V)
    share_M1 = _column([one.top_p if one.top_p < 1 else math.inf for one in given], ordered_MV)
    probs_MV = torch.softmax(ordered_MV.masked_fill(rank_V >= most_M1, -torch.inf), dim=-1)
    before_MV = probs_MV.cumsum(-1) - probs_MV
    return probs_MV.masked_fill((before_MV >= share_M1) & (rank_V > 0), 0.0)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)


def greedy_tokens(logits_NV: Tensor) -> Tensor:
    """The argmax token of each row, or NO_TOKEN; on the device, so that the host reads all rows at once."""
    token_N1 = logits_NV.argmax(-1, keepdim=True)  # of a NaN, if there is one
    is_finite_N1 = logits_NV.gather(-1, token_N1).isfinite()
    return token_N1.where(is_finite_N1, NO_TOKEN).squeeze(-1)


def checked(token: int) -> int:
    """LogitsError for NO_TOKEN."""
    if token == NO_TOKEN:
        raise _not_finite()
    return token


def _not_finite() -> LogitsError:
    return LogitsError("the model computed NaN or infinite logits; its weights or their precision are at fault")
