"""Pick the next token: greedy, or sampled with a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; top_k 0 and top_p 1 cut nothing."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InputError(f"temperature is {self.temperature}; it must be 0 (greedy) or above")
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
        if self.sampling.temperature == 0:
            return int(logits_V.argmax())
        probs_V = torch.softmax(self._cut(logits_V.float().cpu() / self.sampling.temperature), dim=-1)
        return int(torch.multinomial(probs_V, 1, generator=self.generator))

    def picks(self, logits_TV: Tensor, likeliest: Sequence[int] | None = None) -> Iterator[int]:
        """A token for each row, drawn when it is asked for. `likeliest`: the rows' argmax, where it is known."""
        if self.sampling.temperature == 0:
            yield from logits_TV.argmax(-1).tolist() if likeliest is None else likeliest
        else:
            yield from map(self.pick, logits_TV.float().cpu())

    def _cut(self, logits_V: Tensor) -> Tensor:
        if self.sampling.top_k:
            least = logits_V.topk(min(self.sampling.top_k, len(logits_V))).values[-1]
            logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
        if self.sampling.top_p < 1:
            ordered, index = logits_V.sort(descending=True)
            mass = torch.softmax(ordered, dim=-1).cumsum(0)
            beyond = mass - torch.softmax(ordered, dim=-1) >= self.sampling.top_p  # mass before the token
            logits_V = logits_V.clone()
            logits_V[index[beyond]] = -torch.inf
        return logits_V
