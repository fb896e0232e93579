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
        return logits_V.index_fill(0, index_V[is_out_V], -torch.inf)
