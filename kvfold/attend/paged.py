"""Paged attention in PyTorch: attend to a layer's KV pages in the codec's own basis, row by row or run by run.

Attention in parts is exact but for rounding, and rounding depends on where the parts end. A row is all that a head
stores, whatever pages it is in: a prompt that continues a cached prefix rounds as the one that computed it.

Keys keep their stored rotation. With `slot` positions they appear moved towards the query by the gaps behind them:
q at position p - shift against a key at its original position gives the distance to the moved key, so a run of
slots with one shift is read by rotating q, and only a row with many gaps has its keys rotated.

    H KV heads   G query heads per KV head   T queries   S slots   D head dim   N flat slots of a run
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.attend.lse_merge import LseMerge, attend
from kvfold.attend.offloaded import merge_offloaded
from kvfold.attend.topk import TopkSlots, select_topk
from kvfold.core import Rope
from kvfold.pages.dequantize import decode_run, restored_run
from kvfold.pages.extent import Piece, Run
from kvfold.pages.layer import LayerPages
from kvfold.pages.read import in_basis
from kvfold.pages.sequence import SequenceCache

_TILE = 128  # queries whose scores over a part exist at once


@dataclass
class KVPart:
    """Slots of consecutive heads, ready for one attention call: queries already in the basis of the keys."""

    heads: slice
    first: Sequence[int]  # for each head, the index of its first slot here in its row of stored slots
    q_hGTD: Tensor
    k_hSD: Tensor
    v_hSD: Tensor
    offset_hGT: Tensor | None = None  # added to q.k before scaling
    mask_TS: Tensor | None = None
    bias_hS: Tensor | None = None  # added to scaled scores

    def attend(self, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = attend(self.q_hGTD, self.k_hSD, self.v_hSD, scale, mask_TS=self.mask_TS, bias_HS=self.bias_hS)
        return out, lse if self.offset_hGT is None else lse + self.offset_hGT * scale

    def add_mass(self, total_HS: Tensor, lse_HGT: Tensor, scale: float) -> None:
        """Add the attention each slot received, given the log-sum-exp over everything the queries saw."""
        for begin in range(0, self.q_hGTD.shape[2], _TILE):
            mass_hS = self._mass(lse_HGT, scale, slice(begin, begin + _TILE))
            for row_S, first, mass_S in zip(total_HS[self.heads], self.first, mass_hS, strict=True):
                row_S[first : first + len(mass_S)] += mass_S

    def _mass(self, lse_HGT: Tensor, scale: float, tile: slice) -> Tensor:
        """[h, S] from a tile of the queries."""
        score = self.q_hGTD[:, :, tile].float() @ self.k_hSD.float().unsqueeze(1).transpose(-1, -2)
        if self.offset_hGT is not None:
            score += self.offset_hGT[:, :, tile].unsqueeze(-1)
        if self.mask_TS is not None:
            score = score.masked_fill(~self.mask_TS[tile], -torch.inf)
        mass_hS = torch.exp(score * scale - lse_HGT[self.heads, :, tile].unsqueeze(-1)).sum((1, 2))
        return mass_hS if self.bias_hS is None else mass_hS * self.bias_hS.exp()


def merge_paged(
    merge: LseMerge, sequence: SequenceCache, layer: int, q_HGTD: Tensor, start: int, *, whole: bool = False
) -> None:
    """Merge attention to sealed and recalled slots of one layer, for queries at positions start, start + 1, …"""
    scale = sequence.spec.layers[layer].scale
    for part in read_parts(sequence, layer, q_HGTD, start, whole=whole):
        merge.add(part.heads, *part.attend(scale))
    merge_offloaded(merge, sequence, layer, q_HGTD, together=whole)


def read_parts(
    sequence: SequenceCache, layer: int, q_HGTD: Tensor, start: int, *, whole: bool = False
) -> Iterator[KVPart | TopkSlots]:
    """The sealed slots that queries read: those the policy's reader selects, or (`whole`) all they can see."""
    if not whole and sequence.tail.layers[layer].page_class.reader.selects:
        chosen = select_topk(sequence, layer, q_HGTD)
        if chosen is not None:
            if sequence.num_fp_sinks(layer):
                yield _fp_sinks(sequence, layer, q_HGTD)
            yield chosen
            return
    yield from kv_parts(sequence, layer, q_HGTD, start, whole=whole)


def kv_parts(
    sequence: SequenceCache, layer: int, q_HGTD: Tensor, start: int, *, whole: bool = True
) -> Iterator[KVPart]:
    """Every sealed slot of one layer that a query can see: row by row, or, for a step (not `whole`) over slots that
    need no decoding, in as few pieces as storage allows without a copy."""
    spec = sequence.spec.layers[layer]
    first = [0] * spec.num_kv_heads
    skip = sequence.num_fp_sinks(layer)
    if skip:
        yield _fp_sinks(sequence, layer, q_HGTD)
    can_join = spec.sliding_window is None and not sequence.policy.position.shifts
    if can_join and (whole or not sequence.page_class(layer).is_plain):
        yield from row_parts(sequence.layer_parts(layer), q_HGTD, skip)
        return
    for segment in (*sequence.segments, sequence.tail):
        pages = segment.layers[layer]
        if spec.sliding_window is not None:
            if segment is sequence.tail or segment.end_len > start + 1 - spec.sliding_window:
                yield from run_parts(pages, q_HGTD, first, (spec.sliding_window, start))
        elif sequence.policy.position.shifts:
            yield from _shifted(sequence, layer, pages, q_HGTD, first)
        else:
            yield from run_parts(pages, q_HGTD, first, skip=skip)
        first = [n + length for n, length in zip(first, pages.lens, strict=True)]


def _fp_sinks(sequence: SequenceCache, layer: int, q_HGTD: Tensor) -> KVPart:
    """The full-precision sinks; their codes are skipped."""
    assert sequence.fp_sinks is not None
    k_HSD, v_HSD = (side[layer].to(q_HGTD.dtype) for side in (sequence.fp_sinks.k, sequence.fp_sinks.v))
    return KVPart(slice(0, len(k_HSD)), [0] * len(k_HSD), q_HGTD, k_HSD, v_HSD)


def row_parts(parts: Sequence[LayerPages], q_HGTD: Tensor, skip: int) -> Iterator[KVPart]:
    """All slots of each head but the first `skip`, from however many pages they come; heads of one length together."""
    parts = [pages for pages in parts if pages.runs()]
    if not parts:
        return
    q, offset = in_basis(parts[0], q_HGTD)  # segments of a sequence share codec states
    rows = _rows(parts, q_HGTD.dtype)
    lens = {len(row.k) for row in rows}
    alike = [slice(0, len(rows))] if len(lens) == 1 else [slice(head, head + 1) for head in range(len(rows))]
    for heads in alike:
        mine = rows[heads]
        if len(mine[0].k) <= skip:
            continue
        k_hSD, v_hSD = _stacked([row.k for row in mine]), _stacked([row.v for row in mine])
        mine_offset = None if offset is None else offset[heads]
        part = KVPart(heads, [skip] * len(mine), q[heads], k_hSD[:, skip:], v_hSD[:, skip:], mine_offset)
        biases = [row.bias[skip:] for row in mine if row.bias is not None]
        part.bias_hS = torch.stack(biases) if biases else None
        yield part


class _Row(NamedTuple):
    """What one head stores, oldest first."""

    k: Tensor  # [n, D], in the codec's basis
    v: Tensor
    bias: Tensor | None  # [n]


def _rows(parts: Sequence[LayerPages], dtype: torch.dtype) -> list[_Row]:
    found: list[list[_Row]] = [[] for _ in range(parts[0].num_heads)]
    for pages in parts:
        for run in pages.runs():
            k_ND, v_ND = decode_run(pages, run, "k", dtype), decode_run(pages, run, "v", dtype)
            for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
                mine = slice(start, start + length)
                bias = None if run.bias_N is None else run.bias_N[mine]
                found[head].append(_Row(k_ND[mine], v_ND[mine], bias))
    empty = torch.empty(0, 0, dtype=dtype)
    none = _Row(empty, empty, None)
    return [row[0] if len(row) == 1 else _joined(row) if row else none for row in found]


def _joined(row: Sequence[_Row]) -> _Row:
    biases = [part.bias for part in row if part.bias is not None]
    return _Row(
        torch.cat([part.k for part in row]), torch.cat([part.v for part in row]), torch.cat(biases) if biases else None
    )


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """[h, n, D]; no copy of one row."""
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(list(rows))


def run_parts(
    pages: LayerPages, q_HGTD: Tensor, first: list[int], window: tuple[int, int] | None = None, *, skip: int = 0
) -> Iterator[KVPart]:
    """Pages of one layer with keys at their original positions; `first`: slots of each head that came before, `window`:
    its length and the position of the first query, `skip`: first slots of the sequence that are left out."""
    if not pages.runs():
        return
    q, offset = in_basis(pages, q_HGTD)
    done = list(first)
    for run in pages.runs():
        k_ND, v_ND = decode_run(pages, run, "k", q_HGTD.dtype), decode_run(pages, run, "v", q_HGTD.dtype)
        for heads, begins, k_hSD, v_hSD in run.views(k_ND, v_ND):
            out = skip if skip and not any(done[heads]) else 0  # heads of a view are in the same extent of theirs
            if out == k_hSD.shape[1]:
                continue
            places = [place + out for place in done[heads]]
            its_offset = None if offset is None else offset[heads]
            part = KVPart(heads, places, q[heads], k_hSD[:, out:], v_hSD[:, out:], its_offset)
            if window is not None:
                position_S = run.position_N[begins[0] :][: k_hSD.shape[1]]  # heads of such a layer never differ
                length, start = window
                position_T = torch.arange(start, start + q_HGTD.shape[2], device=position_S.device)
                part.mask_TS = position_S > position_T.unsqueeze(-1) - length
            if run.bias_N is not None:
                part.bias_hS = torch.stack([run.bias_N[begin : begin + k_hSD.shape[1]] for begin in begins])
            yield part
        _advance(done, run)


def _advance(done: list[int], run: Run) -> None:
    for head, length in zip(run.heads, run.lens, strict=True):
        done[head] += length


def _shifted(
    sequence: SequenceCache, layer: int, pages: LayerPages, q_HGTD: Tensor, first: list[int]
) -> Iterator[KVPart]:
    """`slot` positions: stored slot i of n appears n - i before the first token that is not sealed."""
    rope = sequence.spec.layers[layer].rope
    assert rope is not None  # checked when the session was made
    before = [sequence.sealed_len - total for total in sequence.stored_lens(layer)]
    done = list(first)
    for run in pages.runs():
        k_ND, v_ND = restored_run(pages, run, "k", q_HGTD.dtype), decode_run(pages, run, "v", q_HGTD.dtype)
        for heads, begins, k_hSD, v_hSD in run.views(k_ND, v_ND):
            length = k_hSD.shape[1]
            position_hS = torch.stack([run.position_N[begin : begin + length] for begin in begins]).to(torch.int64)
            apparent_h = torch.tensor([b + at for b, at in zip(before[heads], done[heads], strict=True)])
            slot_S = torch.arange(length, device=k_ND.device)
            shift_hS = apparent_h.to(k_ND.device).unsqueeze(-1) + slot_S - position_hS
            pieces = sequence.shifts.pieces(run, heads.start, shift_hS, sequence.sealed_len)
            yield from _by_shift(rope, KVPart(heads, done[heads], q_HGTD[heads], k_hSD, v_hSD), shift_hS, pieces)
        _advance(done, run)


def _by_shift(rope: Rope, whole: KVPart, shift_hS: Tensor, pieces: list[Piece] | None) -> Iterator[KVPart]:
    """Split where the shift changes if it changes rarely (sinks and a window), else rotate the keys."""
    if pieces is None:
        yield replace(whole, k_hSD=rope.rotate(whole.k_hSD, shift_hS))
        return
    for slots, shift_h in pieces:
        q_hGTD = rope.rotate(whole.q_hGTD, -shift_h.view(-1, 1, 1))
        first = [at + slots.start for at in whole.first]
        yield KVPart(whole.heads, first, q_hGTD, whole.k_hSD[:, slots], whole.v_hSD[:, slots])
