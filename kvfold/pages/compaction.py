"""Compaction of KV pages: evict stored slots and append new ones, in two steps: allocate pages, then write.

Allocation changes nothing else, so a batch allocates for all its sequences before it writes the first. Kept slots of a
private tail move to the front of their own pages. Shared segments are copy-on-write: if slots of one are evicted, the
kept slots of all segments are copied to a new tail.

`crop` removes the newest tokens after they were sealed, such as rejected drafts. Slots keep their original positions,
so those that go are the last ones of every head; what was evicted while those tokens were there stays evicted.

    N flat slots, head after head   R rows (KV heads)   S slots of a row   D head dim   H KV heads   n sinks
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.codec.base import SIDES
from kvfold.errors import InputError, PolicyError
from kvfold.pages.arena import Arena
from kvfold.pages.async_copy import sent, upload
from kvfold.pages.dequantize import latest_below
from kvfold.pages.kernels.compact_write import can_write, write_new
from kvfold.pages.layer import LayerChange, LayerPages
from kvfold.pages.page_allocation import find_spans, take_pages
from kvfold.pages.segment import Segment, segment_table
from kvfold.pages.sequence import SequenceCache
from kvfold.yielding import yield_point

_FEW_SLOTS = 4096  # of a layer: the states of more take longer than calling for each
_MOST_ALIKE = 256  # layers whose states are computed together


class PageRewrite:
    """One change of one sequence. The constructor allocates pages or raises OutOfPages; then `write` or `cancel` it."""

    def __init__(self, sequence: SequenceCache, changes: Sequence[LayerChange], *, decoding: bool) -> None:
        self.sequence = sequence
        self.changes = changes
        self.decoding = decoding
        _require_relocatable(sequence, changes)
        sequence.reclaim_tail()
        self._kept = self._find_room()
        self.cancel = self._kept.cancel

    def _find_room(self) -> _Copied | _InPlace | _Empty:
        sequence, changes = self.sequence, self.changes
        if sequence.segments and any(change.keep is not None for change in changes):
            return _Copied(sequence, changes)
        if not self.decoding and not any(sequence.tail.spans.values()):
            return _Empty(sequence.tail, changes)
        return _InPlace(sequence, changes, self.decoding)

    @property
    def can_join(self) -> bool:
        """Whether all it does is to write new slots into an empty tail, and a kernel does that for many sequences."""
        return isinstance(self._kept, _Empty) and can_write(self.sequence.tail, self.changes)

    def write(self, num_tokens: int) -> None:
        """Compact the kept slots, then encode the new ones: num_tokens tokens are sealed."""
        self._begin()
        tail = self.sequence.tail
        _write_new(tail, _merged_below(tail.layers, self.changes))
        self._end(num_tokens)

    def _begin(self) -> None:
        self.sequence.is_torn = True
        self._kept.apply()
        _copy_fp_sinks(self.sequence, self.changes)

    def _end(self, num_tokens: int) -> None:
        if not isinstance(self._kept, _Empty):
            self._release_unused()
        self.sequence.sealed_len += num_tokens
        self.sequence.is_torn = False

    def _release_unused(self) -> None:
        tail = self.sequence.tail
        for layer, change in zip(tail.layers, self.changes, strict=True):
            if not self.decoding:
                layer.release_unused()
            elif change.keep is not None:  # budgets of heads vary; keep room for one more block
                layer.release_unused(self.sequence.config.open_len)
        tail.trim()

    @staticmethod
    def write_joined(rewrites: Sequence[tuple[PageRewrite, int]]) -> None:
        """Write those that can join, each with the tokens it seals, in one launch for each arena."""
        for rewrite, _ in rewrites:
            rewrite._begin()
        layers = [layer for rewrite, _ in rewrites for layer in rewrite.sequence.tail.layers]
        _init_states(layers, [change for rewrite, _ in rewrites for change in rewrite.changes])
        tails: dict[Arena, list[tuple[Segment, Sequence[LayerChange]]]] = defaultdict(list)
        for rewrite, _ in rewrites:
            tails[rewrite.sequence.arena].append((rewrite.sequence.tail, rewrite.changes))
        for mine in tails.values():
            write_new(mine)
        for rewrite, num_tokens in rewrites:
            rewrite._end(num_tokens)


def rewrite(
    sequence: SequenceCache, changes: Sequence[LayerChange], num_tokens: int, *, decoding: bool = False
) -> None:
    """Seal num_tokens tokens. Pages are allocated first: OutOfPages leaves the sequence as it was."""
    PageRewrite(sequence, changes, decoding=decoding).write(num_tokens)


class _InPlace:
    """Kept slots of the tail move to the front of their own pages: eviction allocates nothing for them."""

    def __init__(self, sequence: SequenceCache, changes: Sequence[LayerChange], decoding: bool) -> None:
        self._tail = tail = sequence.tail
        self._keeps = [_kept_in_tail(sequence, i, change) for i, change in enumerate(changes)]
        extra = []
        for layer, change, keep in zip(tail.layers, changes, self._keeps, strict=True):
            lens = layer.lens
            kept = lens if keep is None else [len(index) for index in keep]
            columns = zip(change.counts, lens, kept, strict=True)
            extra.append([max(0, new - (length - left)) for new, length, left in columns])
        grows = decoding and not sequence.policy.decode.holds_bytes  # unused room counts as bytes
        growing = [i for i, keep in enumerate(self._keeps) if keep is None] if grows else []
        self._room = tail.find_room(extra, growing=growing)
        self.cancel = self._room.cancel

    def apply(self) -> None:
        self._tail.take(self._room)
        for layer, keep in zip(self._tail.layers, self._keeps, strict=True):
            if keep is not None:
                codes = layer.gather(keep)
                layer.truncate()
                layer.append(codes, [len(index) for index in keep])


class _Empty:
    """A tail without pages gets as many as the new slots need, on arrays: prompts of hundreds of requests are short."""

    def __init__(self, tail: Segment, changes: Sequence[LayerChange]) -> None:
        self._tail = tail
        pages = [
            layer.page_class.pages_for(count)
            for layer, change in zip(tail.layers, changes, strict=True)
            for count in change.counts
        ]
        self._pages_X = np.array(pages)
        self._spans = find_spans(tail, self._pages_X)

    def cancel(self) -> None:
        for span in (span for spans in self._spans.values() for span in spans):
            span.arena.free(span)

    def apply(self) -> None:
        take_pages(self._tail, segment_table(self._tail), self._pages_X, self._spans)


class _Copied:
    """Copy-on-write: kept slots of all segments are copied to a new tail."""

    def __init__(self, sequence: SequenceCache, changes: Sequence[LayerChange]) -> None:
        self._sequence = sequence
        self._keeps = [_kept_of_all(sequence, i, change) for i, change in enumerate(changes)]
        self._tail = Segment.like(sequence.tail)
        self._tail.reserve([
            [len(index) + new for index, new in zip(keep, change.counts, strict=True)]
            for keep, change in zip(self._keeps, changes, strict=True)
        ])  # fmt: skip
        self.cancel = self._tail.release

    def apply(self) -> None:
        sequence = self._sequence
        for i, keep in enumerate(self._keeps):
            start = [0] * len(keep)
            for part in sequence.layer_parts(i):
                ends = [s + n for s, n in zip(start, part.lens, strict=True)]
                mine = [index[(index >= s) & (index < e)] - s for index, s, e in zip(keep, start, ends, strict=True)]
                self._tail.layers[i].append(part.gather(mine), [len(index) for index in mine])
                start = ends
        for segment in (*sequence.segments, sequence.tail):
            segment.release()
        sequence.segments, sequence.tail = [], self._tail


def _copy_fp_sinks(sequence: SequenceCache, changes: Sequence[LayerChange]) -> None:
    """Full-precision copies of the attention sinks (first 4 tokens), read instead of their int4/int2 codes.

    A sink's key differs from the mean key more than others do, so its quantisation step is large, and its error moves
    the attention mass of nearly every query: with the first 4 slots in full precision, int4 and int2 lose a third as
    much (dev/LOG.md). The pages hold their codes too, for eviction, scoring and saving; attention reads the copy.

    They are sealed in one call or in several, and read once all are copied. None of them is ever evicted, so they come
    first in every head.
    """
    block = sequence.fp_sinks
    if block is None or sequence.sealed_len != block.committed:
        return
    layers = sequence.spec.compressible_layers
    first = block.committed
    num_new = min(block.num_slots - first, *(min(changes[i].counts) for i in layers))
    for i in layers if num_new else ():
        for block_HnD, new_ND in ((block.k[i], changes[i].k_ND), (block.v[i], changes[i].v_ND)):
            block_HnD[:, first : first + num_new] = _first_slots(new_ND, changes[i].counts, num_new)
    block.committed += num_new
    block.fill = block.num_slots if block.committed == block.num_slots else 0


def _first_slots(x_ND: Tensor, counts: list[int], num_slots: int) -> Tensor:
    """[H, slots, D]"""
    if min(counts) == max(counts):
        return x_ND.view(len(counts), counts[0], -1)[:, :num_slots]
    begins = accumulate(counts[:-1], initial=0)
    place_N = upload([begin + n for begin in begins for n in range(num_slots)], x_ND.device)
    return x_ND[place_N].view(len(counts), num_slots, -1)


def _require_relocatable(sequence: SequenceCache, changes: Sequence[LayerChange]) -> None:
    for layer, change in zip(sequence.tail.layers, changes, strict=True):
        if change.keep is not None and not layer.page_class.relocatable:
            raise PolicyError(
                "this codec shares scales between neighbouring slots, so stored slots cannot be evicted one by "
                "one; compress once after the first prompt, or use int4 or int2"
            )


def _kept_in_tail(sequence: SequenceCache, index: int, change: LayerChange) -> list[Tensor] | None:
    if change.keep is not None:
        return change.keep  # there are no shared segments
    lens = sequence.tail.layers[index].lens
    gone = change.drop_first - sum(segment.layers[index].lens[0] for segment in sequence.segments)
    return [torch.arange(gone, length, device=sequence.arena.device) for length in lens] if gone > 0 else None


def _kept_of_all(sequence: SequenceCache, index: int, change: LayerChange) -> list[Tensor]:
    if change.keep is not None:
        return change.keep
    return [torch.arange(change.drop_first, n, device=sequence.arena.device) for n in sequence.stored_lens(index)]


def _merged_below(layers: Sequence[LayerPages], changes: Sequence[LayerChange]) -> list[LayerChange]:
    """The changes, with the layer below merged where a cross-layer codec (MiniCache) asks for it."""
    found = list(changes)
    for i in reversed(range(1, len(layers))):
        upper, lower, counts = found[i], found[i - 1], found[i].counts
        if layers[i].page_class.needs_below and any(counts):
            k_ND = layers[i].merge_below("k", lower.k_ND, upper.k_ND, counts)
            v_ND = layers[i].merge_below("v", lower.v_ND, upper.v_ND, counts)
            found[i - 1] = replace(lower, k_ND=k_ND, v_ND=v_ND)
    return found


def _write_new(tail: Segment, changes: Sequence[LayerChange]) -> None:
    """New slots of every layer, behind the stored ones."""
    _init_states(tail.layers, changes)
    if can_write(tail, changes):
        write_new([(tail, changes)])
        return
    for layer, change in zip(tail.layers, changes, strict=True):
        yield_point(may_end=False)
        below = latest_below(layer, change.counts)
        codes = layer.encode(change.k_ND, change.v_ND, change.position_N, change.counts, change.bias_N, below)
        layer.append(codes, change.counts)


def _init_states(layers: Sequence[LayerPages], changes: Sequence[LayerChange]) -> None:
    """Compute the codecs' states from the first slots that are sealed, of short layers together: on a GPU those of many
    sequences, on a CPU those of one length."""
    alike: dict[object, list[int]] = defaultdict(list)
    for i, (layer, change) in enumerate(zip(layers, changes, strict=True)):
        if not layer.state and any(change.counts):
            is_short, is_cuda = len(change.k_ND) <= _FEW_SLOTS, change.k_ND.is_cuda
            kind = layer.page_class, *((len(change.counts),) if is_cuda else change.counts)
            alike[kind if is_short else i].append(i)
    for group in alike.values():
        for begin in range(0, len(group), _MOST_ALIKE):
            some = group[begin : begin + _MOST_ALIKE]
            _init_alike([layers[i] for i in some], [changes[i] for i in some])


def _init_alike(layers: Sequence[LayerPages], changes: Sequence[LayerChange]) -> None:
    page_class, num_heads = layers[0].page_class, len(changes[0].counts)
    for side in SIDES:
        codec = page_class.codec(side)
        if not codec.has_state(side):
            for layer in layers:
                layer.state[side] = {}
            continue
        parts = [change.k_ND if side == "k" else change.v_ND for change in changes]
        x_ND = parts[0] if len(parts) == 1 else torch.cat(parts)
        found = codec.init_state(side, *_by_row(x_ND, [count for change in changes for count in change.counts]))
        for _, segment in groupby(enumerate(layers), lambda numbered: id(numbered[1].changes)):
            places, mine = zip(*segment, strict=True)
            rows = slice(places[0] * num_heads, (places[-1] + 1) * num_heads)
            # A copy, as others' rows would stay with them.
            own = {name: x_R[rows].clone() if len(mine) < len(layers) else x_R for name, x_R in found.items()}
            for i, layer in enumerate(mine):
                layer.state[side] = {name: x_R[i * num_heads : (i + 1) * num_heads] for name, x_R in own.items()}


def _by_row(x_ND: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """Slots [R, S, D], rows padded with 0, and which of them exist."""
    most = max(counts)
    valid_RS = torch.arange(most, device=x_ND.device) < upload(counts, x_ND.device).unsqueeze(-1)
    if min(counts) == most:
        return x_ND.view(len(counts), most, -1), valid_RS
    place_N = np.concatenate([row * most + np.arange(count) for row, count in enumerate(counts)])
    rows_XD = x_ND.new_zeros(len(counts) * most, x_ND.shape[-1]).index_copy_(0, sent(place_N, x_ND.device), x_ND)
    return rows_XD.view(len(counts), most, -1), valid_RS


def crop(sequence: SequenceCache, num_tokens: int) -> None:
    """Drop the last `num_tokens` tokens, open ones first. InputError or PolicyError, with nothing changed, where slots
    that the shorter sequence would need were evicted or cannot be dropped one by one."""
    num_open = min(num_tokens, sequence.open.fill)
    if num_open < num_tokens:
        _crop_sealed(sequence, sequence.sealed_len - (num_tokens - num_open))
    sequence.open.fill -= num_open
    sequence.open.committed = min(sequence.open.committed, sequence.open.fill)


def _crop_sealed(sequence: SequenceCache, length: int) -> None:
    if sequence.offloaded is not None:
        raise InputError("a cache that recalls evicted slots from the host cannot be cropped; leave recall out")
    _check_windows(sequence, length)
    changes = [_cropped(sequence, layer, length) for layer in range(sequence.spec.num_layers)]
    rewrite(sequence, changes, length - sequence.sealed_len)
    sequence.last_compressed_len = min(sequence.last_compressed_len, length)
    if sequence.fp_sinks is not None:
        sequence.fp_sinks.fill = sequence.fp_sinks.committed = min(sequence.fp_sinks.fill, length)
    for state, change in zip(sequence.observed.layers, changes, strict=True):
        state.last_q_QWD = None  # the last of them are queries of cropped tokens
        if state.mass_HS is not None and change.keep is not None:
            rows = [mass_S[keep_S] for mass_S, keep_S in zip(state.mass_HS, change.keep, strict=True)]
            state.mass_HS = pad_sequence(rows, batch_first=True)


def _check_windows(sequence: SequenceCache, length: int) -> None:
    """A sliding-window layer has dropped what the token after the last one cannot see."""
    for index, layer in enumerate(sequence.spec.layers):
        if layer.sliding_window is None:
            continue
        held = sequence.positions(index, 0)
        oldest = int(held[0]) if len(held) else length
        if oldest > max(0, length + 1 - layer.sliding_window):
            raise InputError(
                f"layer {index} has a sliding window of {layer.sliding_window} tokens and has dropped what the "
                f"{length} tokens that are left would need; crop before the window is full, or read the text again"
            )


def _cropped(sequence: SequenceCache, layer: int, length: int) -> LayerChange:
    """Nothing new, and of the stored slots those before `length`."""
    spec, parts, device = sequence.spec.layers[layer], sequence.layer_parts(layer), sequence.arena.device
    heads = range(spec.num_kv_heads)
    position_HS = [torch.cat([part.positions(head) for part in parts]) for head in heads]
    keep = [(position_S < length).nonzero().flatten().to(device) for position_S in position_HS]
    empty = torch.empty(0, spec.head_dim, dtype=sequence.spec.kv_dtype, device=device)
    return LayerChange(empty, empty, torch.empty(0, dtype=torch.int32, device=device), [0] * len(heads), keep)
