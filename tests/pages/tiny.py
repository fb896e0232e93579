"""A hand-made model shape, readable caches, and the plain way to fill and read a sequence.

A readable slot's numbers say whose it is: key channel 0 the token, 1 the layer, 2 the head; values negated. So the
expected cache of a head is a list of token numbers.

    L layers   H KV heads   T tokens   D head dim   Q query heads
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.core import LayerSpec, ModelSpec, Rope
from kvfold.pages.arena import Arena
from kvfold.pages.page_config import PageConfig
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy

SMALL_BLOCK = 4096


def rope(head_dim: int, *, rotary_dim: int | None = None, interleaved: bool = False) -> Rope:
    half = (rotary_dim or head_dim) // 2
    return Rope(tuple(100.0 ** (-i / half) for i in range(half)), interleaved=interleaved)


def tiny_spec(
    *,
    num_layers: int = 2,
    num_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    sliding: dict[int, int] | None = None,
    rotated: Rope | None = None,
    kv_dtype: torch.dtype = torch.float32,
) -> ModelSpec:
    """`sliding`: window of the layers that have one."""
    layers = tuple(
        LayerSpec(
            num_heads,
            num_heads * group,
            head_dim,
            head_dim**-0.5,
            sliding_window=(sliding or {}).get(i),
            rope=rotated or rope(head_dim),
        )
        for i in range(num_layers)
    )
    return ModelSpec("tiny", "tiny", layers, torch.float32, kv_dtype, 4096, 100)


def new_sequence(
    policy: str = "full",
    spec: ModelSpec | None = None,
    *,
    arena: Arena | None = None,
    page_size: int = 4,
    open_len: int = 4,
) -> SequenceCache:
    arena = arena or Arena(4 << 20, superblock_bytes=SMALL_BLOCK)
    return SequenceCache(arena, spec or tiny_spec(), Policy.parse(policy), PageConfig(page_size, open_len))


def readable(spec: ModelSpec, layer: int, start: int, num_tokens: int) -> Tensor:
    """Keys [H, T, D] of tokens start, start + 1, …"""
    shape = spec.layers[layer]
    k_HTD = torch.zeros(shape.num_kv_heads, num_tokens, shape.head_dim)
    k_HTD[..., 0] = torch.arange(start, start + num_tokens)
    k_HTD[..., 1] = layer
    k_HTD[..., 2] = torch.arange(shape.num_kv_heads).unsqueeze(-1)
    return k_HTD


def fill(sequence: SequenceCache, num_tokens: int, *, seen_len: int | None = None, compress: bool = True) -> None:
    """A prefill pass over readable slots."""
    spec = sequence.spec
    current = PrefillPass.begin([sequence], [num_tokens], None if seen_len is None else [seen_len], compress=compress)
    for i, layer in enumerate(spec.layers):
        k = readable(spec, i, sequence.sealed_len, num_tokens)
        current.attend(i, 0, k.repeat_interleave(layer.group, 0), k, -k)
        current.finish_layer(i)
    current.finish()


def step(sequence: SequenceCache, num_tokens: int = 1, *, commit: bool = True) -> None:
    """A decode step over readable slots."""
    spec, current = sequence.spec, DecodePass.begin([sequence], num_tokens)
    for i, layer in enumerate(spec.layers):
        k = readable(spec, i, sequence.logical_len, num_tokens)
        current.attend(i, 0, k.repeat_interleave(layer.group, 0), k, -k)
    current.finish()
    if commit:
        sequence.open.commit(num_tokens)


def tokens_of(sequence: SequenceCache, layer: int) -> list[list[int]]:
    """The token numbers each head really holds, read from its keys, sealed then open; codecs must be lossless."""
    stored, fill, found = stored_slots(sequence, layer, torch.float32), sequence.open.fill, []
    for head, (k, v) in enumerate(zip(stored.k, stored.v, strict=True)):
        k_SD = torch.cat((k, sequence.open.k[layer][head, :fill]))
        v_SD = torch.cat((v, sequence.open.v[layer][head, :fill]))
        assert torch.equal(v_SD, -k_SD)
        assert (k_SD[:, 1] == layer).all() and (k_SD[:, 2] == head).all()
        found.append([int(token) for token in k_SD[:, 0].tolist()])
    return found


def stored_tokens(sequence: SequenceCache, layer: int, head: int) -> list[int]:
    """Positions of the sealed slots of one head."""
    return sequence.positions(layer, head)[: sequence.stored_lens(layer)[head]].tolist()


def random_layers(spec: ModelSpec, num_tokens: int, seed: int = 0) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(q [Q, T, D], k [H, T, D], v [H, T, D]) of every layer."""
    generator = torch.Generator().manual_seed(seed)

    def draw(num_heads: int, head_dim: int) -> Tensor:
        return torch.randn(num_heads, num_tokens, head_dim, generator=generator)

    return [
        (draw(s.num_query_heads, s.head_dim), draw(s.num_kv_heads, s.head_dim), draw(s.num_kv_heads, s.head_dim))
        for s in spec.layers
    ]


def prefill(
    sequence: SequenceCache,
    layers: Sequence[tuple[Tensor, Tensor, Tensor]],
    chunks: Sequence[int] | None = None,
    *,
    compress: bool = True,
) -> list[Tensor]:
    """One layer-major pass over random tensors, in chunks of the given lengths; outputs [Q, T, D] of every layer."""
    num_tokens = layers[0][0].shape[1]
    current = PrefillPass.begin([sequence], [num_tokens], compress=compress)
    outs = []
    for i, (q, k, v) in enumerate(layers):
        pieces = zip(*(x.split(list(chunks or [num_tokens]), dim=1) for x in (q, k, v)), strict=True)
        outs.append(torch.cat([current.attend(i, 0, *piece) for piece in pieces], dim=1))
        current.finish_layer(i)
    current.finish()
    return outs


def decode(sequence: SequenceCache, layers: Sequence[tuple[Tensor, Tensor, Tensor]], at: int) -> list[Tensor]:
    """One committed decode step with token `at` of random tensors; outputs [Q, 1, D]."""
    current = DecodePass.begin([sequence])
    outs = [current.attend(i, 0, *(x[:, at : at + 1] for x in qkv)) for i, qkv in enumerate(layers)]
    current.finish()
    sequence.open.commit(1)
    return outs
