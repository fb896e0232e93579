"""Values and biases of kept slots fitted to the outputs of the full cache (`fit`): the last step before encoding.

S kept slots of a head: sealed ones, then new ones   N new slots, head after head   D head dim
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvfold.evicted.base import CalibrationTargets, Evicted, KeptSlots
from kvfold.pages.change import LayerChange
from kvfold.pages.read import StoredSlots, stored_slots
from kvfold.pages.sequence import SequenceCache


def refitted(
    sequence: SequenceCache, layer: int, change: LayerChange, targets: CalibrationTargets, evicted: Evicted
) -> LayerChange:
    """The change with values and biases that reproduce the targets of each head."""
    found = evicted.refit(targets, _heads(sequence, layer, change))
    return replace(change, v_ND=torch.cat([fit.v_SD for fit in found]), bias_N=torch.cat([fit.bias_S for fit in found]))


def _heads(sequence: SequenceCache, layer: int, change: LayerChange) -> list[KeptSlots]:
    stored = stored_slots(sequence, layer, change.k_ND.dtype)
    columns = (change.k_ND, change.v_ND, change.position_N)
    new = zip(*(column.split(change.counts) for column in columns), strict=True)
    kept = [None] * len(change.counts) if change.keep is None else change.keep
    return [_kept_slots(stored, head, kept[head], *slots) for head, slots in enumerate(new)]


def _kept_slots(
    stored: StoredSlots, head: int, kept_S: Tensor | None, k_ND: Tensor, v_ND: Tensor, position_N: Tensor
) -> KeptSlots:
    parts = stored.k[head], stored.v[head], stored.bias[head], stored.position[head]
    k_SD, v_SD, bias_S, position_S = parts if kept_S is None else (part[kept_S] for part in parts)
    none_N = torch.zeros(len(k_ND), device=k_ND.device)
    return KeptSlots(
        torch.cat((k_SD, k_ND)),
        torch.cat((v_SD, v_ND)),
        torch.cat((bias_S, none_N)),
        torch.cat((position_S, position_N)),
        len(k_SD),
    )
