"""Sampling: greedy, or temperature with top-k and top-p and a seed.

Every accepted temperature and top_p gives finite probabilities: the largest logit is subtracted before the division,
and the argmax token is never cut off. Logits whose maximum is NaN or infinite raise LogitsError.

    V vocabulary   T rows of one request   N rows
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.errors import InputError, LogitsError

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


class Sampler:
    """Draws on the CPU from one generator per request, so a seed gives the same tokens in any batch."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self.generator = torch.Generator().manual_seed(sampling.seed)

    def pick(self, logits_V: Tensor) -> int:
        """LogitsError if the largest logit is not finite."""
        if self.sampling.temperature == 0:
            return checked(int(greedy_tokens(logits_V)))
        logits_V = logits_V.float().cpu()
        top = logits_V.max()
        if not top.isfinite():
            raise _not_finite()
        # In 32 bits smaller temperatures are 0 and larger ones infinite, and 0 / 0 and inf / inf are no numbers.
        temperature = min(max(self.sampling.temperature, 1 / _FLAT), _FLAT)
        probs_V = torch.softmax(self._cut((logits_V - top) / temperature), dim=-1)
        return int(torch.multinomial(probs_V, 1, generator=self.generator))

    def picks(self, logits_TV: Tensor, greedy: Sequence[int] | None = None) -> Iterator[int]:
        """A token for each row, drawn lazily. `greedy`: the argmax of each row, where it is known."""
        if self.sampling.temperature == 0:
            yield from map(checked, greedy_tokens(logits_TV).tolist() if greedy is None else greedy)
        else:
            yield from map(self.pick, logits_TV.float().cpu())

    def _cut(self, logits_V: Tensor) -> Tensor:
        """Without the tokens beyond top_k and top_p; of equally likely ones the first stay, as with argmax."""
        most, share = self.sampling.top_k or len(logits_V), self.sampling.top_p
        if most >= len(logits_V) and share == 1:
            return logits_V
        ordered_V, index_V = logits_V.sort(descending=True, stable=True)
        ordered_V[most:] = -torch.inf
        probs_V = torch.softmax(ordered_V, dim=-1)
        before_V = probs_V.cumsum(0) - probs_V
        is_out_V = ordered_V == -torch.inf
        if share < 1:
            is_out_V |= before_V >= share
            is_out_V[0] = False  # a share may be 0 in 32 bits
        return logits_V.index_fill(0, index_V[is_out_V], -torch.inf)


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
