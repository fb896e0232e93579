"""A cached prefix copied in front of the new tokens, so that a prefix-cache hit is bitwise equal to the cold run.

Attention in parts is exact but for rounding, and rounding depends on where the parts end. Lossless slots of a prefix
are copied in front of the new tokens' keys and values, and attention reads both in one call.

    H KV heads   S stored slots   T new tokens   N flat slots of a run   D head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.codec.base import Side
from kvfold.pages.dequantize import decode_run
from kvfold.pages.sequence import SequenceCache


def can_join(sequence: SequenceCache, layer: int) -> bool:
    """Whether the layer holds every token of the sequence, lossless and in order."""
    length = sequence.sealed_len
    if not length or sequence.policy.position.shifts:
        return False
    pages = sequence.tail.layers[layer].page_class
    is_exact = sequence.spec.layers[layer].compressible and pages.k.lossless and pages.v.lossless
    return is_exact and not pages.has_bias and set(sequence.stored_lens(layer)) == {length}


def room_behind(sequence: SequenceCache, layer: int, side: Side, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """[H, S + T, D], of which the stored slots are written."""
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
