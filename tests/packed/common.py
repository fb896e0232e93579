"""A tiny model in a folder, as an engine would read it, and an entry's rows in a cache of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvfold
from kvfold.models.loader import Model
from kvfold.packed import PackedPrefix
from kvfold.packed.entry import PackedReader
from kvfold.store.key import Key
from kvfold.store.tiers.base import ByteTier
from tests import tiny

TEXT = kvfold.example_text()[:420]


def saved(folder: Path, family: str = "llama") -> Model:
    """Loaded from the folder, in fp32."""
    tiny.build(family).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return kvfold.load(str(folder), dtype="float32", device="cpu", memory="64MB")


def read(tier: ByteTier, packed: PackedPrefix) -> PackedReader:
    key = Key.parse(packed.entry)
    assert key is not None
    file = tier.get(key, 0.0)
    assert file is not None
    return PackedReader(file, key)


def engine_logits(model: Model, tier: ByteTier, packed: PackedPrefix, question_ids: list[int]) -> Tensor:
    """As an engine computes them: the entry's rows at positions 0 … n, the question from position n on."""
    layers = model.spec.layers
    shapes = {i: (layer.num_kv_heads, layer.head_dim) for i, layer in enumerate(layers)}
    cache = DynamicCache()
    for rows in read(tier, packed).layers(shapes):
        cache.update(rows.k.transpose(0, 1)[None], rows.v.transpose(0, 1)[None], rows.layer)
    plain: Any = type(model.hf).from_pretrained(model.name, dtype=torch.float32, attn_implementation="eager").eval()
    positions = torch.arange(packed.num_slots, packed.num_slots + len(question_ids))[None]
    with torch.no_grad():
        out = plain(torch.tensor([question_ids]), past_key_values=cache, position_ids=positions, use_cache=True)
    logits: Tensor = out.logits[0, -1]
    return logits
