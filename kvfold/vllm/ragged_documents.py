"""Packed documents whose heads differ in length, in the blocks of a vLLM worker, and attention of requests on them.

The connector fills the blocks and tells in every step which requests read them (ACTIVE, by first block); the attention
backend asks here. Of a document that vLLM may still hold, a worker keeps lengths and layout; all else is in its blocks.

    H KV heads   G query heads per KV head   Q = H * G   T queries   K own tokens   D head dim
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvfold.attend.block_attention import merge_blocks
from kvfold.attend.lse_merge import LseMerge, attend, compute_dtype
from kvfold.core import Rope
from kvfold.packed.entry import PackedReader
from kvfold.packed.ragged import RaggedLayer, ragged_layers
from kvfold.pages.block_arena import BlockArena, BlockPages


@dataclass(frozen=True)
class RaggedDocument:
    """`num_slots`: placeholders, whole blocks."""

    num_slots: int
    num_tokens: int
    layers: Mapping[int, RaggedLayer]  # without tensors


@dataclass(frozen=True)
class PlacedDocument:
    """A document in these blocks."""

    document: RaggedDocument
    blocks: list[int]
    stored: Mapping[int, BlockPages]  # by layer

    def attend(self, layer: int, q_HGTD: Tensor, scale: float) -> LseMerge:
        """Queries of any requests on it, at positions behind the placeholders."""
        moved = self.document.num_tokens - self.document.num_slots
        cos, sin = _angle(self.document.layers[layer].rope, moved, q_HGTD.device)
        merge = LseMerge(q_HGTD)
        rotated_HGTD = self.document.layers[layer].rope.apply(q_HGTD, cos, sin)
        merge_blocks(merge, self.stored[layer], rotated_HGTD, scale)
        return merge


@lru_cache(maxsize=256)
def _angle(rope: Rope, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return rope.cos_sin(torch.tensor(num_positions, device=device))


ACTIVE: dict[int, PlacedDocument] = {}  # of the running step, by the first block of the requests that read it


class RaggedDocuments:
    """Of one worker, with its attention layers by index.

    It knows as many documents as there are blocks: one that was used before so many others has lost its blocks, since
    vLLM evicts those that were used least recently.
    """

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self._shapes = {index: (layer.num_kv_heads, layer.head_size) for index, layer in layers.items()}
        self._arenas = {index: BlockArena(layer.kv_cache) for index, layer in layers.items()}
        caches = [layer.kv_cache for layer in layers.values()]
        self._dtype, self._most = caches[0].dtype, len(caches[0])
        self._known: OrderedDict[str, RaggedDocument] = OrderedDict()

    def load(self, entry: str, blocks: Sequence[int], reader: PackedReader) -> None:
        """Fill all blocks of a document; InvalidEntry before a layer is written that fails its check."""
        layers = {}
        for index, layer in ragged_layers(reader, self._shapes, self._dtype):
            self._place(index, layer, blocks).write(layer.tensors)
            layers[index] = layer._replace(tensors={})
        self._known[entry] = RaggedDocument(reader.num_slots, reader.num_tokens, layers)
        self._known.move_to_end(entry)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def start_step(self, used: Mapping[int, tuple[str, list[int]]]) -> None:
        """Entries and their blocks, by the first block of requests that run."""
        before = dict(ACTIVE)
        ACTIVE.clear()
        for first, (entry, blocks) in used.items():
            document = self._known[entry]
            self._known.move_to_end(entry)
            old = before.get(first)
            if old is None or old.document is not document or old.blocks != blocks:
                old = self._placed(document, blocks)
            ACTIVE[first] = old

    def _placed(self, document: RaggedDocument, blocks: list[int]) -> PlacedDocument:
        stored = {index: self._place(index, layer, blocks) for index, layer in document.layers.items()}
        return PlacedDocument(document, blocks, stored)

    def _place(self, index: int, layer: RaggedLayer, blocks: Sequence[int]) -> BlockPages:
        return BlockPages(layer.layout, layer.lens, self._arenas[index], blocks)


class RequestRows(NamedTuple):
    """A request of the batch that reads a document: its queries, and the blocks of its own tokens."""

    placed: PlacedDocument
    queries: slice
    num_own: int
    own_blocks: Tensor


def requests_of(metadata: Any) -> list[RequestRows]:
    """Of a step's attention metadata, found in its first layer and kept there: a GPU is waited for once."""
    found: list[RequestRows] | None = getattr(metadata, "kvfold_requests", None)
    if found is None:
        found = metadata.kvfold_requests = _find(metadata) if ACTIVE else []
    return found


def _find(metadata: Any) -> list[RequestRows]:
    starts, lens = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    firsts = metadata.block_table[:, 0].tolist()
    found = []
    for number, (first, seq_len) in enumerate(zip(firsts[: len(lens)], lens, strict=True)):
        placed = ACTIVE.get(first)
        if placed is not None and seq_len > placed.document.num_slots:
            queries = slice(starts[number], starts[number + 1])
            own = metadata.block_table[number, len(placed.blocks) :].long()
            found.append(RequestRows(placed, queries, seq_len - placed.document.num_slots, own))
    return found


class RaggedAttention:
    """What an attention implementation of vLLM needs besides its own."""

    reads_ragged = True
    num_kv_heads: int
    head_size: int
    scale: float

    def own_rows(self, layer: Any, cache_BHNC: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, H, D] of blocks that the engine has written: beside each other in the last axis, as
        backends on GPUs keep them."""
        k_KHD, v_KHD = cache_BHNC[blocks].transpose(1, 2).flatten(0, 1).split(self.head_size, -1)
        return k_KHD, v_KHD

    def attend_ragged(
        self, layer: Any, index: int, query: Tensor, cache_BHNC: Tensor, metadata: Any, output: Tensor
    ) -> None:
        """Write the attention of requests on ragged documents, one call for all requests on each."""
        by_document: dict[int, list[RequestRows]] = defaultdict(list)
        for rows in requests_of(metadata):
            by_document[rows.placed.blocks[0]].append(rows)
        for requests in by_document.values():
            parts = [self._queries(query[rows.queries]) for rows in requests]
            stored = requests[0].placed.attend(index, torch.cat(parts, 2), self.scale)
            assert stored.lse_HGT is not None
            lens = [part.shape[2] for part in parts]
            both = zip(stored.result().split(lens, 2), stored.lse_HGT.split(lens, 2), strict=True)
            for rows, q_HGTD, (out, lse) in zip(requests, parts, both, strict=True):
                merge = LseMerge(q_HGTD)
                merge.add(slice(0, self.num_kv_heads), out, lse)
                self._add_own(merge, layer, q_HGTD, cache_BHNC, rows)
                found_TQD = merge.result().flatten(0, 1).transpose(0, 1)
                output[rows.queries].view(found_TQD.shape).copy_(found_TQD)

    def _queries(self, query: Tensor) -> Tensor:
        q_THGD = query.reshape(len(query), self.num_kv_heads, -1, self.head_size)
        return q_THGD.permute(1, 2, 0, 3).to(compute_dtype(query))

    def _add_own(self, merge: LseMerge, layer: Any, q_HGTD: Tensor, cache_BHNC: Tensor, rows: RequestRows) -> None:
        blocks = rows.own_blocks[: -(-rows.num_own // cache_BHNC.shape[2])]
        own = self.own_rows(layer, cache_BHNC, blocks)
        k_HKD, v_HKD = (x_KHD[: rows.num_own].transpose(0, 1).to(q_HGTD.dtype) for x_KHD in own)
        merge.add(slice(0, self.num_kv_heads), *attend(q_HGTD, k_HKD, v_HKD, self.scale, causal=True))
