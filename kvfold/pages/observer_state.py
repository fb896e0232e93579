"""Observer state of a sequence: attention mass of its slots, the last queries, query moments; ends of sentences.

It counts in the resident bytes of the sequence and is copied on fork. Tensors exist only if the policy's scorers need
them.

    H KV heads   Q query heads   S stored slots   W window   D head dim   E sentences
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvfold.core import LayerSpec

MASS_BYTES = 4  # of one slot: fp32


@dataclass(frozen=True)
class Moments:
    """Sums over the pre-RoPE queries of one layer, each minus `centre`, the mean of the first ones: squares of a large
    mean would drown what varies around it. Sequences that read the same prompt share the value."""

    count: int
    centre_QD: Tensor
    sum_QD: Tensor
    outer_QDD: Tensor

    @staticmethod
    def num_bytes(spec: LayerSpec) -> int:
        return 4 * spec.num_query_heads * spec.head_dim * (2 + spec.head_dim)

    @classmethod
    def empty(cls, spec: LayerSpec, device: torch.device) -> Moments:
        shape = (spec.num_query_heads, spec.head_dim)
        zero_QD = torch.zeros(shape, device=device)
        return cls(0, zero_QD, zero_QD, torch.zeros(*shape, spec.head_dim, device=device))

    def begun(self, q_QTD: Tensor) -> Moments:
        """Centred on these queries, if they are the first."""
        if self.count or not q_QTD.shape[1]:
            return self
        return replace(self, centre_QD=q_QTD.float().mean(1))

    def plus(self, q_QTD: Tensor) -> Moments:
        begun = self.begun(q_QTD)
        q = q_QTD.float() - begun.centre_QD.unsqueeze(1)
        return begun.plus_sums(q.shape[1], q.sum(1), q.transpose(1, 2) @ q)

    def plus_sums(self, count: int, sum_QD: Tensor, outer_QDD: Tensor) -> Moments:
        """Sums of further queries minus the centre."""
        return Moments(self.count + count, self.centre_QD, self.sum_QD + sum_QD, self.outer_QDD + outer_QDD)

    def mean_and_covariance(self) -> tuple[Tensor, Tensor]:
        """[Q, D] and [Q, D, D]; zeros before the first query."""
        count = max(self.count, 1)
        mean_QD = self.sum_QD / count
        cov_QDD = self.outer_QDD / count - mean_QD.unsqueeze(-1) * mean_QD.unsqueeze(-2)
        return self.centre_QD + mean_QD, cov_QDD

    def copy(self) -> Moments:
        return Moments(self.count, self.centre_QD.clone(), self.sum_QD.clone(), self.outer_QDD.clone())


@dataclass
class LayerObserverState:
    """`mass_HS` follows the row order of stored slots (padding 0); `open_mass_HR` that of the open block.

    Last queries and moments are of consecutive tokens, the last of them at `query_end` - 1: tokens that were not
    observed end the run, and the next query that is observed begins a new one.
    """

    mass_HS: Tensor | None = None
    open_mass_HR: Tensor | None = None
    last_q_QWD: Tensor | None = None
    moments: Moments | None = None
    query_end: int = 0

    def tensors(self) -> list[Tensor]:
        found = [self.mass_HS, self.open_mass_HR, self.last_q_QWD]
        if self.moments is not None:
            found += [self.moments.centre_QD, self.moments.sum_QD, self.moments.outer_QDD]
        return [tensor for tensor in found if tensor is not None]

    def copy(self) -> LayerObserverState:
        def clone(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.clone()

        moments = None if self.moments is None else self.moments.copy()
        tensors = clone(self.mass_HS), clone(self.open_mass_HR), clone(self.last_q_QWD)
        return LayerObserverState(*tensors, moments, self.query_end)

    def shallow_copy(self) -> LayerObserverState:
        """With the same tensors."""
        return LayerObserverState(self.mass_HS, self.open_mass_HR, self.last_q_QWD, self.moments, self.query_end)

    def continue_at(self, position: int) -> None:
        """The next query is of this position: keep the queries just before it."""
        if position > self.query_end:
            self.last_q_QWD = self.moments = None
        elif position < self.query_end and self.last_q_QWD is not None:  # drafts were observed and rejected
            kept = self.last_q_QWD.shape[1] - (self.query_end - position)
            self.last_q_QWD = self.last_q_QWD[:, :kept].clone() if kept > 0 else None
        self.query_end = position

    def add_queries(self, q_QTD: Tensor, window: int) -> None:
        """Keep the last `window` queries seen; the new ones follow the others."""
        old = self.last_q_QWD
        joined = q_QTD if old is None else torch.cat((old, q_QTD), dim=1)
        self.last_q_QWD = joined[:, -window:].clone()


@dataclass
class ObserverState:
    """`is_live`: captured steps write its tensors in place, so a snapshot has to copy them."""

    layers: list[LayerObserverState] = field(default_factory=list)
    is_live: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for layer in self.layers for tensor in layer.tensors())

    def set_query_end(self, position: int) -> None:
        """A captured step has observed a query in every layer."""
        for layer in self.layers:
            layer.query_end = position

    def copy(self) -> ObserverState:
        return ObserverState([layer.copy() for layer in self.layers])


class Sentences:
    """Positions of tokens that end a sentence, ascending; the last ones may be of drafts that did not stay."""

    def __init__(self, ends: Iterable[int] = ()) -> None:
        self.ends = list(ends)

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.ends)

    def note(self, start: int, ids: Sequence[int], ending: Container[int]) -> None:
        """These tokens stand at position `start` and behind; what was there before is forgotten."""
        del self.ends[bisect_left(self.ends, start) :]
        self.ends += [start + i for i, token in enumerate(ids) if token in ending]

    def numbers(self, position: Tensor, longest: int) -> Tensor:
        """Of each position, the number of its sentence; after every `longest` tokens a sentence begins anew."""
        start_E = torch.tensor([0, *(end + 1 for end in self.ends)], device=position.device)
        sentence = torch.searchsorted(start_E, position.contiguous(), right=True) - 1
        pieces_E = (start_E.diff() + longest - 1) // longest
        first_E = torch.cat((start_E[:1], pieces_E.cumsum(0)))
        return first_E[sentence] + (position - start_E[sentence]) // longest

    def copy(self) -> Sentences:
        return Sentences(self.ends)
