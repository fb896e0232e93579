"""Caches of imposed head lengths: what a head-wise budget leaves behind, without the prefill that leads there.

Lengths are log-normal, as the counts of `ada` on real prompts roughly are, with a longest head of at least four times
the mean: the case a kernel over ragged heads has to be good at.

    L layers   H KV heads   N flat slots of a layer, head after head   D head dim
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.budget.shares import apportion
from kvfold.core import ModelSpec
from kvfold.engine.runner import Runner
from kvfold.errors import OutOfPages
from kvfold.pages.compaction import rewrite
from kvfold.pages.layer import LayerChange
from kvfold.pages.layout import PageClass
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

Lengths = list[list[int]]  # [layer][head]

_SIGMA = 0.8  # of log length
_SLACK = 4 << 20  # bytes a sequence loses to superblocks that are not full
_SPREAD = 4.0  # the least ratio of the longest head to the mean


def head_lengths(num_layers: int, num_heads: int, mean: int, longest: int, seed: int = 0) -> Lengths:
    """Log-normal lengths in 1..longest whose mean is exactly `mean`.

    max/mean is at least 4 from eight heads on, where mean and `longest` allow: a draw below that has its top lifted.
    """
    if not 1 <= mean <= longest:
        raise ValueError(f"a mean length of {mean} does not lie between 1 and the longest, {longest}")
    draw, count = random.Random(seed), num_layers * num_heads
    weights = [math.exp(draw.gauss(0.0, _SIGMA)) for _ in range(count)]
    low = [1] * count
    total = mean * count
    top = min(longest, math.ceil(_SPREAD * mean), total // 2, total - (count - 1))  # the others keep a slot at least
    low[weights.index(max(weights))] = max(1, top)
    lengths = apportion(total, weights, low, [longest] * count)
    return [lengths[i : i + num_heads] for i in range(0, count, num_heads)]


def describe(lengths: Lengths) -> str:
    """One line that fixes a draw: layers, heads, mean, smallest, longest."""
    flat = [length for layer in lengths for length in layer]
    mean = sum(flat) / len(flat)
    return (
        f"{len(lengths)} layers x {len(lengths[0])} heads, mean {mean:g}, min {min(flat)}, max {max(flat)}, "
        f"max/mean {max(flat) / mean:.2f}"
    )


def fill(sequence: SequenceCache, lengths: Lengths, seen_len: int, seed: int = 0) -> None:
    """Write random slots of these lengths as if `seen_len` tokens had been read and compressed.

    All layers draw on one pool of numbers, at offsets of their own, so that no second cache has to stand beside pages.
    """
    device, spec = sequence.arena.device, sequence.spec
    total = max(sum(layer) for layer in lengths)
    generator = torch.Generator(device).manual_seed(seed)
    shape = (2, total + len(lengths), spec.layers[0].head_dim)
    pool = torch.randn(shape, generator=generator, device=device, dtype=spec.kv_dtype)
    changes = []
    for index, counts in enumerate(lengths):
        k_ND, v_ND = pool[:, index : index + sum(counts)]
        position_N = torch.cat([_positions(count, seen_len, device) for count in counts])
        changes.append(LayerChange(k_ND, v_ND, position_N, list(counts)))
    rewrite(sequence, changes, seen_len)


def _positions(count: int, seen_len: int, device: torch.device) -> Tensor:
    """Ascending positions, spread evenly over what was read."""
    return torch.arange(count, device=device) * seen_len // max(count, 1)


def filled(runner: Runner, policy: Policy, lengths: Lengths, seen_len: int, seed: int = 0) -> SequenceCache:
    sequence = runner.new_sequence(policy)
    fill(sequence, lengths, seen_len, seed)
    return sequence


def copied(source: SequenceCache) -> SequenceCache | None:
    """A second sequence of the same slots in pages of its own; None where the arena has no room for it.

    Nothing is encoded again: pages that are asked for in the same order lie the same way in their span, whose bytes are
    copied whole.
    """
    arena, sealed = source.arena, source.tail
    try:
        sequence = SequenceCache(arena, source.spec, source.policy, source.config)
    except OutOfPages:
        return None
    try:
        sequence.tail.reserve([layer.lens for layer in sealed.layers])
    except OutOfPages:
        sequence.release()
        return None
    for page_class, spans in sealed.spans.items():
        for theirs, mine in zip(spans, sequence.tail.spans[page_class], strict=True):
            begin, end = (span.start * arena.superblock_bytes for span in (theirs, mine))
            arena.memory[end : end + mine.num_bytes] = arena.memory[begin : begin + theirs.num_bytes]
    _take_over(sequence, source)
    return sequence


def _take_over(sequence: SequenceCache, source: SequenceCache) -> None:
    """Lengths of extents, which lie as those of the source do, and what its codecs learnt."""
    for mine, theirs in zip(sequence.tail.layers, source.tail.layers, strict=True):
        for own, other in zip(mine.extents, theirs.extents, strict=True):
            assert [(e.first, e.num_pages) for e in own] == [(e.first, e.num_pages) for e in other], "another layout"
            for extent, full in zip(own, other, strict=True):
                extent.length = full.length
        mine.state = {side: {n: t.clone() for n, t in state.items()} for side, state in theirs.state.items()}
    sequence.tail.changes.rise()
    if sequence.fp_sinks is not None and source.fp_sinks is not None:
        sequence.fp_sinks.copy_from(source.fp_sinks)
    sequence.sealed_len = source.sealed_len


def slot_bytes(sequences: Sequence[SequenceCache]) -> float:
    """Bytes of stored slots with their metadata, without the padding of pages."""
    return sum(
        sum(part.lens) * part.page_class.bytes_per_slot
        for sequence in sequences
        for layer in range(sequence.spec.num_layers)
        for part in sequence.layer_parts(layer)
    )


def open_bytes(sequences: Sequence[SequenceCache]) -> float:
    """Bytes of open slots a step reads, half full on average."""
    return sum(sequence.open.num_bytes / 2 for sequence in sequences)


def arena_bytes(spec: ModelSpec, policy: Policy, mean_len: int, sequences: int = 1, open_len: int = 32) -> int:
    """An arena that just holds sequences of `mean_len` slots per head: slots, a page of padding each, open blocks."""
    total = 0.0
    for index, layer in enumerate(spec.layers):
        k, v = policy.codec.sides(index, spec.num_layers)
        page_class = PageClass(k, v, layer.head_dim, spec.kv_dtype)
        opened = 2 * open_len * layer.head_dim * spec.kv_dtype.itemsize
        total += layer.num_kv_heads * (mean_len * page_class.bytes_per_slot + page_class.bytes_per_page + opened)
    return sequences * (math.ceil(total) + _SLACK)
