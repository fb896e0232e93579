"""Reading stored slots back: per run for attention, per head in the model's own basis for scorers.

N flat slots of a run, used or not   D head dim   H KV heads   G query heads per KV head   T queries
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.pages.decode import decode_run, restored_run
from kvfold.pages.layer import LayerPages
from kvfold.pages.sequence import SequenceCache

__all__ = ["StoredSlots", "decode_run", "in_basis", "restored_run", "stored_slots"]


@dataclass
class StoredSlots:
    """Sealed slots of one layer, one tensor per head, oldest first."""

    k: list[Tensor]  # [n, D]
    v: list[Tensor]
    position: list[Tensor]  # int64 [n]

    @property
    def lens(self) -> list[int]:
        return [len(position) for position in self.position]


def in_basis(pages: LayerPages, q_HGTD: Tensor) -> tuple[Tensor, Tensor | None]:
    """Queries in the basis of the stored keys, and what to add to q.k, before scaling, as [H, G, T]."""
    q, offset = pages.page_class.k.query(q_HGTD.flatten(1, 2), pages.state.get("k", {}))
    shape = q_HGTD.shape[1:3]
    return q.unflatten(1, shape), None if offset is None else offset.unflatten(1, shape)


def stored_slots(sequence: SequenceCache, layer: int, dtype: torch.dtype) -> StoredSlots:
    """What a scorer sees of the sealed slots."""
    num_heads = sequence.spec.layers[layer].num_kv_heads
    k: list[list[Tensor]] = [[] for _ in range(num_heads)]
    v: list[list[Tensor]] = [[] for _ in range(num_heads)]
    position: list[list[Tensor]] = [[] for _ in range(num_heads)]
    for pages in sequence.layer_parts(layer):
        for run in pages.runs():
            k_ND, v_ND = restored_run(pages, run, "k", dtype), restored_run(pages, run, "v", dtype)
            for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
                mine = slice(start, start + length)
                k[head].append(k_ND[mine])
                v[head].append(v_ND[mine])
                position[head].append(run.position_N[mine].to(torch.int64))
    empty_D = torch.empty(0, sequence.spec.layers[layer].head_dim, dtype=dtype, device=sequence.arena.device)
    empty = torch.empty(0, dtype=torch.int64, device=sequence.arena.device)
    return StoredSlots(
        [torch.cat(parts) if parts else empty_D for parts in k],
        [torch.cat(parts) if parts else empty_D for parts in v],
        [torch.cat(parts) if parts else empty for parts in position],
    )
