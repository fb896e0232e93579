"""Cascade attention of a decode step on a CPU: sequences that share a prefix read its slots together.

A step is bound by the slots that it reads. The segments of a cached prefix are one for all sequences that share it, so
their queries are read against it as the rows of one call (attend/cpu_attention.py), and the rest of each sequence is
read on its own. Both are joined by their log-sum-exp.

    B sequences of a step   b those of a group   H KV heads   G query heads per KV head   Q query heads   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import is_

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.attend.cpu_attention import cpu_attention
from kvfold.attend.stored_parts import StoredParts, reads_head_dim, stored_parts
from kvfold.core import HAS_AVX512_KERNELS
from kvfold.pages.places import Ints
from kvfold.pages.segment import Segment, segment_table
from kvfold.pages.sequence import SequenceCache

Floats = NDArray[np.float32]

_FEWEST_SEQUENCES = 2


@dataclass(frozen=True, eq=False)
class Group:
    """Sequences that begin with the same `num_shared` segments, by their number in a step; `layers`: their places."""

    index_b: Ints
    num_shared: int
    layers: list[StoredParts]
    is_bf16: bool  # as the model is

    def attend(self, layer: int, q_BQD: Tensor, scale: float, found: tuple[Floats, Floats]) -> None:
        """Add the shared slots to what was found of the others: outputs [B, H, G, D] and log-sum-exps [B, H, G]."""
        out_BHGD, lse_BHG = found
        q_bQD = torch.from_numpy(q_BQD.numpy()[self.index_b])
        q_HGbD = q_bQD.view(len(self.index_b), *out_BHGD.shape[1:]).permute(1, 2, 0, 3)
        between = (q_BQD.shape[-1],) * 2
        call = cpu_attention(q_BQD.shape[-1], self.is_bf16)
        shared_HGbD, shared_HGb = call.attend_parts(q_HGbD, self.layers[layer].part_HP4, scale, between, causal=False)
        shared_bHGD, shared_bHG = shared_HGbD.permute(2, 0, 1, 3).numpy(), shared_HGb.permute(2, 0, 1).numpy()
        out_bHGD, lse_bHG = out_BHGD[self.index_b], lse_BHG[self.index_b]
        joined_bHG = np.logaddexp(lse_bHG, shared_bHG)
        own_bHG, other_bHG = (np.exp(x_bHG - joined_bHG)[..., None] for x_bHG in (lse_bHG, shared_bHG))
        out_BHGD[self.index_b] = own_bHG * out_bHGD + other_bHG * shared_bHGD
        lse_BHG[self.index_b] = joined_bHG


def groups_of(sequences: Sequence[SequenceCache]) -> list[Group]:
    """The groups of a step."""
    if not HAS_AVX512_KERNELS or not reads_head_dim(sequences[0].spec.layers[0].head_dim):
        return []
    found: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequences):
        if sequence.segments and sequence.fp_sinks is None:
            found.setdefault(id(sequence.segments[0]), []).append(index)
    groups = []
    for indices in found.values():
        if len(indices) >= _FEWEST_SEQUENCES:
            num_shared = _num_shared([sequences[index].segments for index in indices])
            layers = _parts_of(sequences[indices[0]], num_shared)
            if layers is not None:
                groups.append(Group(np.array(indices), num_shared, layers, sequences[0].spec.is_bf16))
    return groups


def _num_shared(segments: Sequence[Sequence[Segment]]) -> int:
    """From the first one on."""
    alike = (len(set(map(id, level))) == 1 for level in zip(*segments, strict=False))
    return sum(takewhile(bool, alike))


def _parts_of(sequence: SequenceCache, num_shared: int) -> list[StoredParts] | None:
    """The same object while the sequence has these segments; None if a layer of theirs is empty or no floats."""
    segments = sequence.segments[:num_shared]
    tables = tuple(map(segment_table, segments))
    known: tuple[tuple[object, ...], list[StoredParts] | None] | None = sequence.derived.get("cascade")
    if known is None or len(known[0]) != len(tables) or not all(map(is_, known[0], tables)):
        known = sequence.derived["cascade"] = tables, _build(segments, sequence.spec.kv_dtype)
    return known[1]


def _build(segments: Sequence[Segment], dtype: torch.dtype) -> list[StoredParts] | None:
    found = []
    for layer in range(len(segments[0].layers)):
        parts = stored_parts([segment.layers[layer] for segment in segments], dtype)
        if parts is None or not parts.are_even:
            return None
        found.append(parts)
    return found
