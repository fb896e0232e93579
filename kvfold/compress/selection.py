"""Survivors of a round of compression, layer by layer, until they are written.

A layer starts with everything and is trimmed, once or (budgets over all layers) again and again. The device decides
what stays; the host learns how many, and from then on every index has a known length.

    H KV heads   S slots of a head, stored then new   N new slots, head after head   X = H * S   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.budget.scores import Scores
from kvfold.evicted.base import CalibrationTargets, Evicted, Split
from kvfold.pages.async_copy import Download, indices, upload
from kvfold.pages.change import EvictedSlots, LayerChange


class KeptCounts(NamedTuple):
    """Slots of one layer that stay, head by head."""

    stored: list[int]
    new: list[int]


@dataclass
class Selection:
    """Survivors of one layer so far: a mask over its slots, and the new ones among them as flat tensors."""

    scores: Scores
    num_stored: list[int]
    change: LayerChange
    weights: Scores  # what the budget is shared out by: the scores, or what the budget made of them

    def __post_init__(self) -> None:
        self.keep_HS = self.scores.exists_HS
        self._slot_N: Tensor | None = None  # which of X the new ones are, head after head; None: all of them
        if any(self.num_stored):
            self._slot_N = indices((self.keep_HS & ~self._is_stored_HS).flatten(), sum(self.change.counts))

    @cached_property
    def _is_stored_HS(self) -> Tensor:
        device = self.keep_HS.device
        slot_S = torch.arange(self.keep_HS.shape[1], device=device)
        return slot_S < upload(self.num_stored, device).unsqueeze(-1)

    def stored_among(self, count_H: Tensor) -> Tensor:
        """int64 [H]: how many of the best slots of each head are stored ones."""
        return (self.scores.choose(count_H) & self._is_stored_HS).sum(-1)

    def trim(self, count_H: Tensor, numbers: KeptCounts, evicted: Evicted) -> None:
        """Drop all but the best, whose numbers the host knows too: from here on the device is asked for none."""
        stored, new = numbers
        kept_stored = self.num_stored if self.change.keep is None else [len(index) for index in self.change.keep]
        if new != self.change.counts or stored != kept_stored:
            self._drop(self.scores.choose(count_H), new, stored, evicted)

    def _drop(self, keep_HS: Tensor, new: list[int], stored: list[int], evicted: Evicted) -> None:
        slot_N = self._slot_N
        stays_N = keep_HS.flatten() if slot_N is None else keep_HS.flatten()[slot_N]
        index_N = indices(stays_N, sum(new))
        gone = (*self.change.gone, self._gone(stays_N, new)) if evicted.offloads else ()
        k_ND, v_ND = self._folded(stays_N, index_N, evicted)
        position_N, keep = self.change.position_N[index_N], self._stored(keep_HS, stored)
        self.change = LayerChange(k_ND, v_ND, position_N, new, keep, gone=gone)
        self.keep_HS, self._slot_N = keep_HS, index_N if slot_N is None else slot_N[index_N]

    def _gone(self, stays_N: Tensor, new: list[int]) -> EvictedSlots:
        """New slots that do not stay, on their way to the host."""
        change = self.change
        counts = [before - after for before, after in zip(change.counts, new, strict=True)]
        index_N = indices(~stays_N, sum(counts))
        k_ND, v_ND, position_N = (x[index_N].to("cpu") for x in (change.k_ND, change.v_ND, change.position_N))
        return EvictedSlots(k_ND, v_ND, position_N, counts)

    def _folded(self, stays_N: Tensor, index_N: Tensor, evicted: Evicted) -> tuple[Tensor, Tensor]:
        change = self.change
        if not evicted.changes:
            return change.k_ND[index_N], change.v_ND[index_N]
        columns = (change.k_ND, change.v_ND, change.position_N, stays_N)
        heads = zip(*(column.split(change.counts) for column in columns), strict=True)
        folded = [evicted.fold(Split(*head)) for head in heads]
        return torch.cat([k for k, _ in folded]), torch.cat([v for _, v in folded])

    def _stored(self, keep_HS: Tensor, counts: list[int]) -> list[Tensor] | None:
        """Indices of the stored slots that stay, per head; None: all of them."""
        if counts == self.num_stored:
            return None
        flat_N = indices((keep_HS & self._is_stored_HS).flatten(), sum(counts))
        return list((flat_N % keep_HS.shape[1]).split(counts))


class PendingSelection:
    """How many slots of each head stay in some layers, while the numbers are on their way to the host."""

    def __init__(self, layers: Sequence[Selection], counts: Sequence[Tensor], evicted: Evicted) -> None:
        self._layers, self._counts, self._evicted = layers, counts, evicted
        self._count_LH = Download(torch.stack(list(counts)))
        self._stored_LH: Download | None = None
        if any(any(layer.num_stored) for layer in layers):
            stored = [layer.stored_among(count_H) for layer, count_H in zip(layers, counts, strict=True)]
            self._stored_LH = Download(torch.stack(stored))

    def settle(self) -> None:
        for layer, count_H, numbers in zip(self._layers, self._counts, self._numbers(), strict=True):
            layer.trim(count_H, numbers, self._evicted)

    def _numbers(self) -> list[KeptCounts]:
        stay_LH = self._count_LH.wait()
        stored_LH = torch.zeros_like(stay_LH) if self._stored_LH is None else self._stored_LH.wait()
        return list(map(KeptCounts, stored_LH.tolist(), (stay_LH - stored_LH).tolist()))


@dataclass
class RoundLayer:
    """One layer of the round: `staged` where slots compete; the attention mass of all its slots, if it is counted;
    what its heads answered to calibration queries, if slots are to answer for others."""

    change: LayerChange
    mass_HS: Tensor | None = None
    staged: Selection | None = None
    asked: CalibrationTargets | None = None

    @property
    def settled_mass_HS(self) -> Tensor | None:
        """The mass of survivors, in their new row order."""
        if self.mass_HS is None or self.staged is None:
            return self.mass_HS
        rows = [mass_S[keep_S] for mass_S, keep_S in zip(self.mass_HS, self.staged.keep_HS, strict=True)]
        return pad_sequence(rows, batch_first=True)
