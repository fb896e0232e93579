"""The entry of a packed prefix: n slots in every head of every layer, keys at the positions of an engine's prompt.

A document of T tokens is kept as n slots. The engine sees n placeholders, so a token behind them has position n + i
where the document's would be T + i. RoPE is relative: every key is rotated once by the angle of n - T, and meets
queries at the distance it had. Positions below zero are as good as others.

    block "sequence"    lens: int64 [T, n, vocabulary]
    block of a layer    k, v: [n, H, D] in the dtype of the KV cache
    key                 tokens 0 … n; its digest covers the binding and all content, so it names this entry alone

Entries whose heads have lengths of their own hold other layers (`kvfold.packed.ragged`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from kvfold.core import Rope
from kvfold.store.entry.format import EntryReader, Fields, InvalidEntry
from kvfold.store.key import Binding, Key, Kind, digest_text

SEQUENCE = "sequence"
TTL_S = 10 * 365 * 86400.0  # packed on purpose: they go when they are deleted, or behind all others


def rotate_keys(rope: Rope, k: Tensor, num_tokens: int, num_slots: int) -> Tensor:
    """Keys [..., D] of a document of `num_tokens`, as if it had `num_slots` tokens."""
    shift = torch.full(k.shape[:-1], num_slots - num_tokens, dtype=torch.int64, device=k.device)
    return rope.rotate(k, shift)


def rope_digest(config: Any) -> str:
    """Of the rotary parameters in a transformers config, which every engine reads from the same file."""
    found = getattr(config, "rope_parameters", None)
    return digest_text(json.dumps(found, sort_keys=True, default=str))


def packed_binding(
    weights: str, dtype: torch.dtype, rope: str, policy: str, signer: str, *, ragged: str = ""
) -> Binding:
    """What the slots depend on besides the document; `ragged`: the format of a ragged entry."""
    kind: Kind = "ragged" if ragged else "packed"
    name = str(dtype)
    return Binding(kind, weights, name, name, rope, "", policy, ragged, 0, 0, "", signer=signer)


def packed_key(binding: Binding, num_slots: int, blocks: Mapping[str, Fields]) -> Key:
    """Named by its content."""
    found = hashlib.blake2b(binding.scope.encode(), digest_size=32)
    for name, fields in blocks.items():
        for field, tensor in sorted(fields.items()):
            found.update(f"{name}.{field} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return Key(binding.scope, 0, num_slots, found.hexdigest())


def packed_blocks(num_tokens: int, vocab_size: int, layers: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Fields]:
    """(keys, values) [n, H, D] of every layer, keys rotated."""
    rows = {str(i): {"k": k.contiguous(), "v": v.contiguous()} for i, (k, v) in enumerate(layers)}
    return sequence_block(num_tokens, len(layers[0][0]), vocab_size) | rows


def sequence_block(num_tokens: int, num_slots: int, vocab_size: int) -> dict[str, Fields]:
    return {SEQUENCE: {"lens": torch.tensor([num_tokens, num_slots, vocab_size])}}


class LayerRows(NamedTuple):
    """Slots of one layer, [n, H, D]."""

    layer: int
    k: Tensor
    v: Tensor


class PackedReader:
    """Reads and checks an entry; InvalidEntry if it is none, or another one than the key names."""

    def __init__(self, file: BinaryIO, key: Key, *, secret: bytes = b"") -> None:
        self._reader = EntryReader(file, key, None, secret=secret)
        self.facts = self._reader.facts
        self.is_ragged = self.facts.get("kind") == "ragged"
        if not self.is_ragged and self.facts.get("kind") != "packed":
            raise InvalidEntry("foreign", "it is no packed prefix")
        self._blocks = self._reader.blocks()
        name, fields = next(self._blocks, ("", {}))
        lens = fields.get("lens")
        if name != SEQUENCE or lens is None or lens.dtype != torch.int64 or lens.shape != (3,):
            raise InvalidEntry("corrupt", "it does not begin with its lengths")
        self.num_tokens, self.num_slots, self.vocab_size = lens.tolist()
        if self.num_slots != key.num_tokens or not 0 < self.num_slots <= self.num_tokens:
            raise InvalidEntry("corrupt", f"it says {self.num_slots} slots of {self.num_tokens} tokens")

    def layers(self, shapes: Mapping[int, tuple[int, int]]) -> Iterator[LayerRows]:
        """Rows of every layer in order, as they are read and checked. `shapes`: heads and head dim by layer, of those
        that are wanted; others are checked and left out."""
        for index, fields in self.named(shapes):
            wanted = (self.num_slots, *shapes[index])
            k, v = fields.get("k"), fields.get("v")
            if k is None or v is None or k.shape != wanted or v.shape != wanted:
                raise InvalidEntry("foreign", f"layer {index} is not of shape {wanted}, as the model's")
            yield LayerRows(index, k, v)

    def named(self, shapes: Mapping[int, tuple[int, int]]) -> Iterator[tuple[int, Fields]]:
        """The tensors of those layers."""
        expected = 0
        for name, fields in self._blocks:
            if name != str(expected):
                raise InvalidEntry("corrupt", f'its layer {expected} is called "{name}"')
            if expected in shapes:
                yield expected, fields
            expected += 1
        if missing := [layer for layer in shapes if layer >= expected]:
            raise InvalidEntry("foreign", f"it has {expected} layers, and the model has layer {missing[0]}")
