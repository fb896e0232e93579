"""Read (dequantise) stored KV slots: per run for attention, per head in the model's own basis for scorers.

N flat slots of a run, used or not   D head dim   H KV heads   G query heads per KV head   T queries
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.pages.dequantize import restored_run
from kvfold.pages.fp_sinks import layer_fp_sinks
from kvfold.pages.layer import LayerPages
from kvfold.pages.sequence import SequenceCache


@dataclass
class StoredSlots:
    """Sealed slots of one layer, one tensor per head, oldest first."""

    k: list[Tensor]  # [n, D]
    v: list[Tensor]
    position: list[Tensor]  # int64 [n]
    bias: list[Tensor]  # fp32 [n]; 0 where slots have none

    @property
    def lens(self) -> list[int]:
        return [len(position) for position in self.position]


def in_basis(pages: LayerPages, q_HGTD: Tensor) -> tuple[Tensor, Tensor | None]:
    """Queries in the basis of the stored keys, and what to add to q.k, before scaling, as [H, G, T]."""
    q, offset = pages.page_class.k.query(q_HGTD.flatten(1, 2), pages.state.get("k", {}))
    shape = q_HGTD.shape[1:3]
    return q.unflatten(1, shape), None if offset is None else offset.unflatten(1, shape)


def stored_slots(sequence: SequenceCache, layer: int, dtype: torch.dtype) -> StoredSlots:
    """What a scorer sees of the sealed slots: what attention reads."""
    found = slots_of(sequence.layer_parts(layer), dtype, sequence.arena.device)
    if (count := layer_fp_sinks(sequence, layer)) and sequence.fp_sinks is not None:
        for head, (k_nD, v_nD) in enumerate(zip(found.k, found.v, strict=True)):
            k_nD[:count] = sequence.fp_sinks.k[layer][head]
            v_nD[:count] = sequence.fp_sinks.v[layer][head]
    return found


def slots_of(parts: Sequence[LayerPages], dtype: torch.dtype, device: torch.device) -> StoredSlots:
    """The slots of a layer over some segments, oldest first; at least one."""
    num_heads = parts[0].num_heads
    k: list[list[Tensor]] = [[] for _ in range(num_heads)]
    v: list[list[Tensor]] = [[] for _ in range(num_heads)]
    position: list[list[Tensor]] = [[] for _ in range(num_heads)]
    bias: list[list[Tensor]] = [[] for _ in range(num_heads)]
    for pages in parts:
        for run in pages.runs():
            k_ND, v_ND = restored_run(pages, run, "k", dtype), restored_run(pages, run, "v", dtype)
            for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
                mine = slice(start, start + length)
                k[head].append(k_ND[mine])
                v[head].append(v_ND[mine])
                position[head].append(run.position_N[mine].to(torch.int64))
                none_n = torch.zeros(length, device=device)
                bias[head].append(none_n if run.bias_N is None else run.bias_N[mine])
    empty_D = torch.empty(0, parts[0].page_class.head_dim, dtype=dtype, device=device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return StoredSlots(
        [torch.cat(found) if found else empty_D for found in k],
        [torch.cat(found) if found else empty_D for found in v],
        [torch.cat(found) if found else empty for found in position],
        [torch.cat(found) if found else empty.float() for found in bias],
    )
