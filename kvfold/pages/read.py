"""Read (dequantise) stored KV slots: per run for attention, per head in the model's own basis for scorers; and how many
bytes a decode step reads.

N flat slots of a run, used or not   D head dim   H KV heads   G query heads per KV head   T queries   S stored slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.codec.base import Side
from kvfold.pages.dequantize import decode_run, restored_run
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
    if (count := sequence.num_fp_sinks(layer)) and sequence.fp_sinks is not None:
        for head, (k_nD, v_nD) in enumerate(zip(found.k, found.v, strict=True)):
            k_nD[:count] = sequence.fp_sinks.k[layer][head]
            v_nD[:count] = sequence.fp_sinks.v[layer][head]
    return found


def slots_of(parts: Sequence[LayerPages], dtype: torch.dtype, device: torch.device) -> StoredSlots:
    """The slots of a layer over some segments, oldest first; at least one."""
    heads: list[list[tuple[Tensor, ...]]] = [[] for _ in range(parts[0].num_heads)]
    for pages in parts:
        for run in pages.runs():
            k_ND, v_ND = restored_run(pages, run, "k", dtype), restored_run(pages, run, "v", dtype)
            bias_N = torch.zeros(len(k_ND), device=device) if run.bias_N is None else run.bias_N
            columns = k_ND, v_ND, run.position_N.to(torch.int64), bias_N
            for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
                heads[head].append(tuple(column[start : start + length] for column in columns))
    empty_D = torch.empty(0, parts[0].page_class.head_dim, dtype=dtype, device=device)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    none = (empty_D, empty_D, empty, empty.float())
    rows = [[torch.cat(column) for column in zip(*found, strict=True)] if found else none for found in heads]
    return StoredSlots(*(list(column) for column in zip(*rows, strict=True)))


def can_join(sequence: SequenceCache, layer: int) -> bool:
    """Whether the layer holds every token of the sequence, lossless and in order."""
    length = sequence.sealed_len
    if not length or sequence.policy.position.shifts:
        return False
    pages = sequence.tail.layers[layer].page_class
    is_exact = sequence.spec.layers[layer].compressible and pages.k.lossless and pages.v.lossless
    return is_exact and not pages.has_bias and set(sequence.stored_lens(layer)) == {length}


def room_behind(sequence: SequenceCache, layer: int, side: Side, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """[H, S + T, D], of which the S stored slots are written: a cached prefix in front of T new tokens.

    Attention in parts is exact but for rounding, and rounding depends on where the parts end. One call over a lossless
    prefix and the new tokens makes a prefix-cache hit bitwise equal to the cold run.
    """
    spec = sequence.spec.layers[layer]
    shape = (spec.num_kv_heads, sequence.sealed_len + num_tokens, spec.head_dim)
    joined_HSD = torch.empty(shape, dtype=dtype, device=sequence.arena.device)
    done = [0] * spec.num_kv_heads
    for pages in sequence.layer_parts(layer):
        for run in pages.runs():
            x_ND = decode_run(pages, run, side, sequence.spec.kv_dtype)  # a view: these are the model's own bytes
            for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
                joined_HSD[head, done[head] : done[head] + length] = x_ND[start : start + length]
                done[head] += length
    return joined_HSD


def stored_bytes_read(sequence: SequenceCache, layer: int) -> float:
    """KV bytes that one decode step reads of a layer: every sealed slot, or the selected ones and all page summaries.

    Summaries count only if the head holds more slots than the reader selects; so do the layer below that a cross-layer
    codec decodes again, and the full-precision sinks.
    """
    page_class, parts = sequence.page_class(layer), sequence.layer_parts(layer)
    every = sum(sequence.stored_lens(layer)) * page_class.code_bytes / page_class.page_size
    spec, num_sinks = sequence.spec.layers[layer], sequence.num_fp_sinks(layer)
    sink_bytes = num_sinks * spec.num_kv_heads * spec.head_dim * 2 * sequence.spec.kv_dtype.itemsize
    every += sink_bytes
    if page_class.needs_below:  # which may need its own
        every += stored_bytes_read(sequence, layer - 1)
    if not page_class.reader.selects:
        return every
    heads = [[extent for part in parts for extent in part.extents[head]] for head in range(parts[0].num_heads)]
    pages = [sum(page_class.pages_for(extent.length) for extent in extents) for extents in heads]
    unit = page_class.reader.unit(page_class.page_size, page_class.group)
    most = page_class.reader.num_units(unit)
    if max(pages) * page_class.page_size <= most * unit:
        return every
    units = [sum(-(-extent.length // unit) for extent in extents) for extents in heads]
    unit_bytes = page_class.code_bytes * unit / page_class.page_size
    looked_bytes = page_class.summary_bytes + page_class.entry_bytes
    return sink_bytes + sum(min(count, most) for count in units) * unit_bytes + sum(pages) * looked_bytes
