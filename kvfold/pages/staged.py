"""Survivors of a round of compression, layer by layer, until they are written.

A layer starts with everything and is trimmed, once or (budgets over all layers) again and again. The device decides
what stays; the host learns how many, and from then on every index has a known length.

    H KV heads   S slots of a head, stored then new   N new slots, head after head   X = H * S   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.evicted.base import Asked, Evicted, Split
from kvfold.pages.rewrite import Gone, LayerChange
from kvfold.pages.transfer import Download, indices, upload


@dataclass
class Staged:
    """Survivors of one layer so far: a mask over its slots, and the new ones among them as flat tensors."""

    score_HS: Tensor
    keep_HS: Tensor
    num_stored: list[int]
    change: LayerChange
    weight_HS: Tensor  # what the budget is shared out by: the scores, or what the budget made of them

    def __post_init__(self) -> None:
        device = self.score_HS.device
        slot_S = torch.arange(self.score_HS.shape[1], device=device)
        self.is_new_HS = slot_S >= upload(self.num_stored, device).unsqueeze(-1)

    def chosen(self, keep_HS: Tensor) -> Chosen:
        """Keep fewer: keep_HS is a subset of what is kept. The counts of new and stored slots start for the host."""
        count_2H = torch.stack(((keep_HS & self.is_new_HS).sum(-1), (keep_HS & ~self.is_new_HS).sum(-1)))
        return Chosen(self, keep_HS, Download(count_2H))

    def trim(self, keep_HS: Tensor, new: list[int], stored: list[int], evicted: Evicted) -> None:
        """Drop what is not chosen; from here on the host knows every number and the device is asked for none."""
        kept_stored = self.num_stored if self.change.keep is None else [len(index) for index in self.change.keep]
        if new == self.change.counts and stored == kept_stored:
            return
        was_new_X = (self.keep_HS & self.is_new_HS).flatten()  # row-major, so head after head as in the change
        slot_N = indices(was_new_X, sum(self.change.counts))
        stays_N = keep_HS.flatten()[slot_N]
        index_N = indices(stays_N, sum(new))
        gone = (*self.change.gone, self._gone(stays_N, new)) if evicted.demotes else ()
        k_ND, v_ND = self._folded(stays_N, index_N, slot_N, evicted)
        position_N, keep = self.change.position_N[index_N], self._stored(keep_HS, stored)
        self.change = LayerChange(k_ND, v_ND, position_N, new, keep, gone=gone)
        self.keep_HS = keep_HS

    def _gone(self, stays_N: Tensor, new: list[int]) -> Gone:
        """New slots that do not stay, on their way to the host."""
        change = self.change
        counts = [before - after for before, after in zip(change.counts, new, strict=True)]
        index_N = indices(~stays_N, sum(counts))
        k_ND, v_ND, position_N = (x[index_N].to("cpu") for x in (change.k_ND, change.v_ND, change.position_N))
        return Gone(k_ND, v_ND, position_N, counts)

    def _folded(self, stays_N: Tensor, index_N: Tensor, slot_N: Tensor, evicted: Evicted) -> tuple[Tensor, Tensor]:
        change = self.change
        if not evicted.changes:
            return change.k_ND[index_N], change.v_ND[index_N]
        columns = (change.k_ND, change.v_ND, change.position_N, stays_N, self.score_HS.flatten()[slot_N])
        heads = zip(*(column.split(change.counts) for column in columns), strict=True)
        folded = [evicted.fold(Split(*head)) for head in heads]
        return torch.cat([k for k, _ in folded]), torch.cat([v for _, v in folded])

    def _stored(self, keep_HS: Tensor, counts: list[int]) -> list[Tensor] | None:
        """Indices of the stored slots that stay, per head; None: all of them."""
        if counts == self.num_stored:
            return None
        flat_N = indices((keep_HS & ~self.is_new_HS).flatten(), sum(counts))
        return list((flat_N % keep_HS.shape[1]).split(counts))


class Chosen(NamedTuple):
    """What stays of a layer, while the counts are on their way to the host."""

    staged: Staged
    keep_HS: Tensor
    count_2H: Download

    def settle(self, evicted: Evicted) -> None:
        new, stored = self.count_2H.wait().tolist()
        self.staged.trim(self.keep_HS, new, stored, evicted)


@dataclass
class StagedLayer:
    """One layer of the round: `staged` where slots compete; the attention mass of all its slots, if it is counted;
    what its heads answered to calibration queries, if slots are to answer for others."""

    change: LayerChange
    mass_HS: Tensor | None = None
    staged: Staged | None = None
    asked: Asked | None = None

    @property
    def settled_mass_HS(self) -> Tensor | None:
        """The mass of survivors, in their new row order."""
        if self.mass_HS is None or self.staged is None:
            return self.mass_HS
        rows = [mass_S[keep_S] for mass_S, keep_S in zip(self.mass_HS, self.staged.keep_HS, strict=True)]
        return pad_sequence(rows, batch_first=True)
