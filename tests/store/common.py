"""A clock to set, keys and entries to put, and a store over a tiny model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.store.entry.format import encode
from kvfold.store.key import Binding, Key
from kvfold.store.prefixes import Hit, Prefixes
from kvfold.store.store import PrefixStore
from kvfold.store.tiers.eviction import Lease

CHUNK = 16
PAGES = PageConfig(page_size=4, open_len=8)
BINDING = Binding("chunks", "w", "float32", "float32", "r", "t", "p", "", CHUNK, CHUNK, "")


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def make_key(number: int, *, binding: Binding = BINDING, end: int = CHUNK) -> Key:
    return Key(binding.scope, end - CHUNK, end, hashlib.sha256(str(number).encode()).hexdigest())


def make_entry(key: Key, lease: Lease, *, num_layers: int = 2, binding: Binding = BINDING) -> bytes:
    """Blocks whose numbers tell the layer and the key."""
    v = torch.arange(5) + key.end
    blocks = {str(i): {"k.x": torch.full((2, 3), float(i)), "v.x": v} for i in range(num_layers)}
    return encode(key, binding, blocks, lease)


def make_prefixes(store: PrefixStore, model: Model, policy: str = "full", *, tenant: str = "") -> Prefixes:
    return store.prefixes(model, policy, prefill_len=CHUNK, config=PAGES, tenant=tenant)


def make_runner(model: Model) -> Runner:
    return Runner(model.hf, model.spec, model.arena, chunk_len=CHUNK)


def cold_logits(model: Model, tokens: Sequence[int], stops: Sequence[int] = ()) -> Tensor:
    """Of a run that knows no store, and stops where one with markers does."""
    runner = make_runner(model)
    sequence = runner.new_sequence(Policy.parse("full"), PAGES)
    try:
        parts = [tokens[begin:end] for begin, end in pairwise((0, *stops, len(tokens)))]
        return [runner.prefill([sequence], [part]) for part in parts][-1][0]
    finally:
        sequence.release()


def finish(model: Model, hit: Hit, tokens: Sequence[int]) -> Tensor:
    """Read what a lookup left; logits after the last token. The sequence is still open."""
    return make_runner(model).prefill([hit.sequence], [tokens[hit.matched_tokens :]])[0]


def entry_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("entries/*/*/*.kvp"))


def overwrite(path: Path, data: bytes) -> None:
    """As a failing disk would: the times stay, or the entry would count as expired."""
    stat = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def positions(sequence: SequenceCache) -> list[list[list[int]]]:
    heads = [range(layer.num_kv_heads) for layer in sequence.spec.layers]
    return [[sequence.positions(i, head).tolist() for head in of] for i, of in enumerate(heads)]
