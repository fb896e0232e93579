"""Decode steps of a batch beside those of the same sequences, each alone.

N sequences   Q query heads   H KV heads   S slots   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from tests.attend.reference import Layers
from tests.pages.tiny import decode


def assert_batch_reads_as_alone(batch: Sequence[SequenceCache], alone: Sequence[SequenceCache], layers: Layers) -> None:
    """Six steps have the same outputs, and leave the same attention mass; open blocks of four seal between, not all at
    once."""
    for at in range(70, 76):
        step = DecodePass.begin(batch)
        mine = [decode(sequence, layers, at) for sequence in alone]  # in PyTorch, one by one
        for i, qkv in enumerate(layers):
            new = (x[:, at : at + 1].expand(-1, len(batch), -1) for x in qkv)
            found_NQD = step.attend_packed(i, *new)
            expected_NQD = torch.cat([outs[i] for outs in mine], dim=1).transpose(0, 1)
            torch.testing.assert_close(found_NQD, expected_NQD, atol=1e-5, rtol=1e-4)
        step.finish()
        for sequence in batch:
            sequence.open.commit(1)
    for one, other in zip(alone, batch, strict=True):
        for side, mine_too in zip(one.observed.layers, other.observed.layers, strict=True):
            torch.testing.assert_close(side.mass_HS, mine_too.mass_HS, atol=1e-5, rtol=1e-4)
