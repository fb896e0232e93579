"""The connector in a vLLM worker: copies blocks between the KV cache and the store.

Chunks are copied as whole blocks, whose inside differs between backends and instruction sets; the layout is part of
their names. Rows of packed prefixes are written by the backend's own writer, which knows the inside; ragged documents
are pages of kvfold inside blocks (`kvfold.vllm.ragged_documents`). Every layer's part of an entry is checked before it
is written.

    B blocks   n slots   H KV heads of this rank   D head dim
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index

from kvfold.errors import InputError
from kvfold.packed.client import PACK_AGAIN
from kvfold.packed.entry import PackedReader
from kvfold.store.entry.format import EntryReader, InvalidEntry, encode
from kvfold.store.key import Binding, Key
from kvfold.store.tiers.eviction import Lease
from kvfold.vllm.engine_facts import EngineFacts
from kvfold.vllm.messages import ChunkBlocks, PackedTransfer, StepPlan, WorkerLayout, WorkerReport
from kvfold.vllm.ragged_documents import RaggedDocuments
from kvfold.vllm.shared_store import SharedStore
from kvfold.vllm.stats import FoldStats


@dataclass(frozen=True)
class Rank:
    """Which part of the model a worker has."""

    tensor: int
    tensor_size: int
    pipeline: int
    total_kv_heads: int

    def heads(self, num_heads: int) -> slice:
        """KV heads of the model that a layer with `num_heads` of them has here; ranks beyond their number share."""
        first = self.tensor * self.total_kv_heads // self.tensor_size
        return slice(first, first + num_heads)


class WorkerSide:
    def __init__(self, facts: EngineFacts, store: SharedStore, rank: Rank, layers: Mapping[str, Any]) -> None:
        self._facts = facts
        self._store = store
        self._rank = rank
        self._layers = layers  # attention layers by name, filled when the model is loaded
        self._caches: dict[str, Tensor] = {}
        self._layout = WorkerLayout("", None, None)
        self._ragged: RaggedDocuments | None = None
        self._bad_blocks: set[int] = set()
        self._received: set[str] = set()
        self._report = WorkerReport()
        self.stats = FoldStats()

    def register(self, caches: Mapping[str, Tensor], num_blocks: int) -> None:
        for name, cache in caches.items():
            if len(cache) != num_blocks:
                shape = tuple(cache.shape)
                raise InputError(
                    f"kvfold's connector copies whole blocks, and the KV cache of {name} is {shape}, not {num_blocks} "
                    "blocks; set --block-size to what the attention backend uses"
                )
        self._caches = dict(caches)
        refusal = self._ragged_refusal()
        self._layout = WorkerLayout(self._describe(), self._packed_refusal(), refusal)
        if refusal is None:
            self._ragged = RaggedDocuments({extract_layer_index(name): self._layers[name] for name in caches})

    def _describe(self) -> str:
        kinds = []
        for name, cache in self._caches.items():
            layer = self._layers.get(name)
            backend = type(getattr(layer, "impl", None)).__qualname__
            inside = f"{getattr(layer, 'isa', '')} {tuple(cache.shape[1:])} {cache.stride()[1:]} {cache.dtype}"
            kinds.append(f"{name} {backend} {inside}")
        return f"{self._rank} {'; '.join(kinds)}"

    def _packed_refusal(self) -> str | None:
        for name in self._caches:
            impl = getattr(self._layers.get(name), "impl", None)
            if not hasattr(impl, "do_kv_cache_update"):
                return f"the attention backend {type(impl).__name__} cannot write rows of its KV cache from outside"
        return None

    def _ragged_refusal(self) -> str | None:
        impls = [getattr(self._layers.get(name), "impl", None) for name in self._caches]
        if not all(hasattr(impl, "reads_ragged") for impl in impls):
            how = "with KVFOLD_VLLM_RAGGED=1, on CUDA also --attention-backend CUSTOM"
            return f"the entry has heads of different length or codecs, which vLLM reads {how}"
        if any(getattr(impl, "logits_soft_cap", 0) or getattr(impl, "sinks", None) is not None for impl in impls):
            return "the model caps its scores or has attention sinks of its own, which ragged entries do not know"
        if self._rank.tensor_size > 1:
            return "the entry has heads of different length, which are not split over ranks; use one rank"
        return None

    @property
    def layout(self) -> WorkerLayout:
        return self._layout

    # Loads

    def load(self, plan: StepPlan) -> None:
        """What fails is reported; nothing raises."""
        for transfer in plan.loads:
            binding = self._facts.binding(transfer.tenant, self._layout.layout)
            for number, chunk in enumerate(transfer.chunks):
                if not self._load_chunk(binding, chunk):
                    rest = transfer.chunks[number:]  # of no use without this one
                    self._bad_blocks.update(block for one in rest for block in one.blocks)
                    break
            self._received.add(transfer.request_id)
        for packed in plan.packed:
            self._load_packed(packed)
            self._received.add(packed.request_id)

    def _load_chunk(self, binding: Binding, chunk: ChunkBlocks) -> bool:
        began = time.perf_counter()
        key = Key(binding.scope, chunk.start, chunk.end, chunk.digest)
        copy = self._store.open(key)
        if copy is None:
            self.stats.add("failed_loads")
            return False
        with copy.file as file:
            try:
                reader = EntryReader(file, key, binding, secret=self._store.secret)
                self._write_blocks(chunk, reader)
            except InvalidEntry as error:
                self._store.drop(copy, error)
                self._report.bad_digests.add(chunk.digest)
                self.stats.add("failed_loads")
                return False
        self.stats.add("loaded_tokens", len(chunk.blocks) * self._facts.block_size)
        self.stats.add("loaded_bytes", reader.num_bytes)
        self.stats.add("load_seconds", time.perf_counter() - began)
        return True

    def _write_blocks(self, chunk: ChunkBlocks, reader: EntryReader) -> None:
        whole = (chunk.end - chunk.start) // self._facts.block_size
        to, wanted = torch.tensor(chunk.blocks), slice(chunk.skip, chunk.skip + len(chunk.blocks))
        found = 0
        for (name, cache), (block, fields) in zip(self._caches.items(), reader.blocks(), strict=False):
            rows = fields.get("kv")
            shape = (whole, *cache.shape[1:])
            if block != name or rows is None or rows.shape != shape or rows.dtype != cache.dtype:
                raise InvalidEntry("foreign", f"its block {block} does not fit layer {name}")
            cache[to.to(cache.device)] = rows[wanted].to(cache.device)
            found += 1
        if found != len(self._caches):
            raise InvalidEntry("foreign", f"it has {found} of {len(self._caches)} layers")

    def _load_packed(self, packed: PackedTransfer) -> None:
        began = time.perf_counter()
        key = Key.parse(packed.entry)
        assert key is not None
        copy = self._store.open(key)
        reason = "it is no longer in the store"
        if copy is not None:
            with copy.file as file:
                try:
                    reader = PackedReader(file, key, secret=self._store.secret)
                    self._write_rows(packed, reader)
                    self.stats.add("packed_loads")
                    self.stats.add("loaded_tokens", len(packed.blocks) * self._facts.block_size)
                    self.stats.add("load_seconds", time.perf_counter() - began)
                    return
                except InvalidEntry as error:
                    self._store.drop(copy, error)
                    reason = f"it is damaged ({error.reason})"
        self.stats.add("failed_loads")
        self._bad_blocks.update(packed.blocks)
        self._report.failed[packed.request_id] = f"the entry could not be loaded: {reason}; {PACK_AGAIN}"

    def start_step(self, plan: StepPlan) -> None:
        """Before the forward: which requests read ragged documents."""
        if self._ragged is not None:
            self._ragged.start_step({first: (use.entry, use.blocks) for first, use in plan.ragged.items()})

    def _write_rows(self, packed: PackedTransfer, reader: PackedReader) -> None:
        if reader.is_ragged:
            assert self._ragged is not None
            self._ragged.load(packed.entry, [*packed.before, *packed.blocks], reader)
            return
        size = self._facts.block_size
        slots_n = (torch.tensor(packed.blocks)[:, None] * size + torch.arange(size)).flatten()
        by_layer = {extract_layer_index(name): self._layers[name] for name in self._caches}
        total = self._rank.total_kv_heads
        shapes = {index: (total, layer.head_size) for index, layer in by_layer.items()}
        for rows in reader.layers(shapes):
            layer = by_layer[rows.layer]
            heads, cache = self._rank.heads(layer.num_kv_heads), layer.kv_cache
            k_nHD, v_nHD = (x_nHD[packed.start :, heads].contiguous().to(cache.device) for x_nHD in (rows.k, rows.v))
            layer.impl.do_kv_cache_update(layer, k_nHD, v_nHD, cache, slots_n.to(cache.device))

    # Stores

    def store(self, plan: StepPlan) -> None:
        """Blocks are copied now, and written in the background."""
        for transfer in plan.stores:
            binding = self._facts.binding(transfer.tenant, self._layout.layout)
            for chunk in transfer.chunks:
                self._store_chunk(binding, chunk)

    def _store_chunk(self, binding: Binding, chunk: ChunkBlocks) -> None:
        key = Key(binding.scope, chunk.start, chunk.end, chunk.digest)
        taken = torch.tensor(chunk.blocks)
        blocks = {name: {"kv": cache[taken.to(cache.device)].cpu()} for name, cache in self._caches.items()}
        num_bytes = sum(fields["kv"].nbytes for fields in blocks.values())

        def encoded(lease: Lease) -> bytes:
            return encode(key, binding, blocks, lease, self._store.secret)

        if self._store.put(key, num_bytes, encoded):
            self.stats.add("stored_tokens", chunk.end - chunk.start)
            self.stats.add("stored_bytes", num_bytes)

    # What vLLM asks after a step

    def take_stats(self) -> FoldStats | None:
        """With writes that failed in the background since."""
        if failed := self._store.take_failed():
            self.stats.add("failed_stores", failed)
        return self.stats.take()

    def take_received(self) -> set[str]:
        found, self._received = self._received, set()
        return found

    def take_bad_blocks(self) -> set[int]:
        found, self._bad_blocks = self._bad_blocks, set()
        return found

    def take_report(self) -> WorkerReport | None:
        found, self._report = self._report, WorkerReport()
        return found if found.failed or found.bad_digests else None
