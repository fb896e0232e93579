"""The slots selected in each layer of a compression round, until they are written; and their fit to the full cache.

A layer starts with all slots and is trimmed: once, or repeatedly if the budget is shared by all layers. The device
selects; the host reads back the counts only, so every later index has a known length.

    H KV heads   S slots of a head, stored then new   N new slots, head after head   X = H * S   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.budget.base import Scores
from kvfold.evicted.base import CalibrationTargets, Evicted, KeptSlots, Split
from kvfold.pages.async_copy import Download, indices, upload
from kvfold.pages.layer import EvictedSlots, LayerChange
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache


@dataclass
class Selection:
    """The slots of one layer kept so far: a mask over all its slots, and the new ones as flat tensors."""

    scores: Scores
    num_stored: list[int]
    change: LayerChange
    weights: Scores  # what the allocator compares: the scores, or what it made of them

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

    def num_stored_kept(self, count_H: Tensor) -> Tensor:
        """int64 [H]: how many of the best slots of each head are already stored."""
        return (self.scores.select(count_H) & self._is_stored_HS).sum(-1)

    def trim(self, count_H: Tensor, stored: list[int], new: list[int], evicted: Evicted) -> None:
        """Keep the best slots of each head; the host knows the counts of stored and new ones, so nothing waits for the
        device."""
        kept_stored = self.num_stored if self.change.keep is None else [len(index) for index in self.change.keep]
        if new != self.change.counts or stored != kept_stored:
            self._drop(self.scores.select(count_H), new, stored, evicted)

    def _drop(self, keep_HS: Tensor, new: list[int], stored: list[int], evicted: Evicted) -> None:
        slot_N = self._slot_N
        keep_N = keep_HS.flatten() if slot_N is None else keep_HS.flatten()[slot_N]
        index_N = indices(keep_N, sum(new))
        dropped = (*self.change.evicted, self._evicted(keep_N, new)) if evicted.recall is not None else ()
        k_ND, v_ND = self._folded(keep_N, index_N, evicted)
        position_N, keep = self.change.position_N[index_N], self._stored(keep_HS, stored)
        self.change = LayerChange(k_ND, v_ND, position_N, new, keep, evicted=dropped)
        self.keep_HS, self._slot_N = keep_HS, index_N if slot_N is None else slot_N[index_N]

    def _evicted(self, keep_N: Tensor, new: list[int]) -> EvictedSlots:
        """New slots that are dropped, copied to the host."""
        change = self.change
        counts = [before - after for before, after in zip(change.counts, new, strict=True)]
        index_N = indices(~keep_N, sum(counts))
        k_ND, v_ND, position_N = (x[index_N].to("cpu") for x in (change.k_ND, change.v_ND, change.position_N))
        return EvictedSlots(k_ND, v_ND, position_N, counts)

    def _folded(self, keep_N: Tensor, index_N: Tensor, evicted: Evicted) -> tuple[Tensor, Tensor]:
        change = self.change
        if not evicted.folds:
            return change.k_ND[index_N], change.v_ND[index_N]
        columns = (change.k_ND, change.v_ND, change.position_N, keep_N)
        heads = zip(*(column.split(change.counts) for column in columns), strict=True)
        folded = [evicted.fold(Split(*head)) for head in heads]
        return torch.cat([k for k, _ in folded]), torch.cat([v for _, v in folded])

    def _stored(self, keep_HS: Tensor, counts: list[int]) -> list[Tensor] | None:
        """Indices of the stored slots that are kept, per head; None: all of them."""
        if counts == self.num_stored:
            return None
        flat_N = indices((keep_HS & self._is_stored_HS).flatten(), sum(counts))
        return list((flat_N % keep_HS.shape[1]).split(counts))


class PendingSelection:
    """Counts of kept slots per head in some layers, while they are copied to the host."""

    def __init__(self, layers: Sequence[Selection], counts: Sequence[Tensor], evicted: Evicted) -> None:
        self._layers, self._counts, self._evicted = layers, counts, evicted
        self._count_LH = Download(torch.stack(list(counts)))
        self._stored_LH: Download | None = None
        if any(any(layer.num_stored) for layer in layers):
            stored = [layer.num_stored_kept(count_H) for layer, count_H in zip(layers, counts, strict=True)]
            self._stored_LH = Download(torch.stack(stored))

    def apply(self) -> None:
        kept_LH = self._count_LH.wait()
        stored_LH = torch.zeros_like(kept_LH) if self._stored_LH is None else self._stored_LH.wait()
        numbers = stored_LH.tolist(), (kept_LH - stored_LH).tolist()
        for layer, count_H, stored, new in zip(self._layers, self._counts, *numbers, strict=True):
            layer.trim(count_H, stored, new, self._evicted)


@dataclass
class RoundLayer:
    """One layer of the round: `selection` if its slots compete; the attention mass of all its slots, if it is observed;
    the outputs to calibration queries that kept slots are fitted to (`fit`)."""

    change: LayerChange
    mass_HS: Tensor | None = None
    selection: Selection | None = None
    targets: CalibrationTargets | None = None

    @property
    def kept_mass_HS(self) -> Tensor | None:
        """The mass of kept slots, in their new row order."""
        if self.mass_HS is None or self.selection is None:
            return self.mass_HS
        rows = [mass_S[keep_S] for mass_S, keep_S in zip(self.mass_HS, self.selection.keep_HS, strict=True)]
        return pad_sequence(rows, batch_first=True)


def refitted(
    sequence: SequenceCache, layer: int, change: LayerChange, targets: CalibrationTargets, evicted: Evicted
) -> LayerChange:
    """The change with values and biases of kept slots fitted to the outputs of the full cache (`fit`): the last step
    before encoding."""
    found = evicted.refit(targets, _kept_slots(sequence, layer, change))
    return replace(change, v_ND=torch.cat([fit.v_SD for fit in found]), bias_N=torch.cat([fit.bias_S for fit in found]))


def _kept_slots(sequence: SequenceCache, layer: int, change: LayerChange) -> list[KeptSlots]:
    """Of each head, stored ones, then new ones."""
    stored, found = stored_slots(sequence, layer, change.k_ND.dtype), []
    columns = (change.k_ND, change.v_ND, torch.zeros_like(change.position_N, dtype=torch.float32), change.position_N)
    for head, new in enumerate(zip(*(column.split(change.counts) for column in columns), strict=True)):
        old = [stored.k[head], stored.v[head], stored.bias[head], stored.position[head]]
        if change.keep is not None:
            old = [part[change.keep[head]] for part in old]
        k_SD, v_SD, bias_S, position_S = (torch.cat(pair) for pair in zip(old, new, strict=True))
        found.append(KeptSlots(k_SD, v_SD, bias_S, position_S, len(old[0])))
    return found
