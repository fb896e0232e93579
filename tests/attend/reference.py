"""Attention the plain way: one head at a time over everything it can see, in fp64.

T queries   S slots   D head dim
"""

from __future__ import annotations

import cmath
from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.core import ModelSpec, Rope
from kvfold.pages.compaction import rewrite
from kvfold.pages.layer import LayerChange
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache

Layers = Sequence[tuple[Tensor, Tensor, Tensor]]


def weights(q_TD: Tensor, k_SD: Tensor, scale: float, mask_TS: Tensor | None = None) -> Tensor:
    score = q_TD.double() @ k_SD.double().T * scale
    return torch.softmax(score if mask_TS is None else score.masked_fill(~mask_TS, -torch.inf), dim=-1)


def causal(num_queries: int, num_before: int, window: int | None = None) -> Tensor:
    """bool [T, S] over `num_before` earlier slots and the queries' own."""
    query = torch.arange(num_before, num_before + num_queries).unsqueeze(-1)
    slot = torch.arange(num_before + num_queries)
    return (slot <= query) & (slot > query - (window or slot.numel() + 1))


def full_attention(spec: ModelSpec, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[Q, T, D] over all tokens, causal and within the layer's window."""
    shape = spec.layers[layer]
    mask = causal(q.shape[1], 0, shape.sliding_window)
    heads = [head // shape.group for head in range(len(q))]
    outs = [weights(q[i], k[h], shape.scale, mask) @ v[h].double() for i, h in enumerate(heads)]
    return torch.stack(outs).float()


def read_attention(sequence: SequenceCache, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[Q, T, D] of new tokens over restored slots, the filled open block and themselves."""
    shape = sequence.spec.layers[layer]
    stored, fill = stored_slots(sequence, layer, torch.float32), sequence.open.fill
    outs = []
    for i, q_TD in enumerate(q):
        h = i // shape.group
        k_SD = torch.cat((stored.k[h], sequence.open.k[layer][h, :fill].float(), k[h]))
        v_SD = torch.cat((stored.v[h], sequence.open.v[layer][h, :fill].float(), v[h]))
        mask = causal(len(q_TD), len(k_SD) - len(q_TD))
        outs.append(weights(q_TD, k_SD, shape.scale, mask) @ v_SD.double())
    return torch.stack(outs).float()


def rotated(rope: Rope, x_SD: Tensor, by_S: Sequence[int]) -> Tensor:
    """Keys rotated by so many positions: pairs of channels as complex numbers, one slot at a time."""
    out = x_SD.double().clone()
    half = len(rope.frequencies)
    pairs = [(2 * i, 2 * i + 1) if rope.interleaved else (i, i + half) for i in range(half)]
    for slot, by in enumerate(by_S):
        for (a, b), frequency in zip(pairs, rope.frequencies, strict=True):
            number = complex(float(x_SD[slot, a]), float(x_SD[slot, b])) * cmath.exp(1j * by * frequency)
            out[slot, a], out[slot, b] = number.real, number.imag
    return out.float()


def seal_some(sequence: SequenceCache, layers: Layers, share: float, seed: int) -> None:
    """Seal all tokens of `layers` as the next ones, each head a random part of them (at least one)."""
    generator = torch.Generator().manual_seed(seed)
    changes = []
    for _, k, v in layers:
        keep_HT = torch.rand(k.shape[:2], generator=generator) < share
        keep_HT[:, -1] = True
        position_HT = torch.arange(sequence.sealed_len, sequence.sealed_len + k.shape[1]).expand(keep_HT.shape)
        counts = keep_HT.sum(-1).tolist()
        changes.append(LayerChange(k[keep_HT], v[keep_HT], position_HT[keep_HT], counts))
    rewrite(sequence, changes, layers[0][1].shape[1])


def part(layers: Layers, start: int, end: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(q[:, start:end], k[:, start:end], v[:, start:end]) for q, k, v in layers]
