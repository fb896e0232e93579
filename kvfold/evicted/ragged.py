"""Heads of unequal length side by side, so that one batch of products and factorisations serves them.

    B heads of a batch   N queries   F sealed slots   M new slots   S = M + F   D head dim

        | new, padded to M | sealed, padded to F |

Padding has the log-bias -inf: no query gives it any weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.evicted.base import CalibrationTargets, KeptSlots
from kvfold.evicted.calibration_targets import scores

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
