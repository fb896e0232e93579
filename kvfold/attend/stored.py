"""Attention to sealed pages: run by run, each in its codec's own basis.

Keys keep their stored rotation. With `slot` positions they appear moved towards the query by the gaps behind them:
q at position p - shift against a key at its original position gives the distance to the moved key, so a stretch of
slots with one shift is read by turning q, and only a row with many gaps has its keys turned.

    H KV heads   G query heads per KV head   T queries   S slots   D head dim   N flat slots of a run
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attend.partial import Merge, attend
from kvfold.core import LayerSpec, Rope
from kvfold.pages.read import decode_run, restored_run
from kvfold.pages.segment import LayerPages, Run
from kvfold.pages.sequence import SequenceCache


@dataclass
class Stretch:
    """Slots of consecutive heads, ready for one attention call: queries already in the basis of the keys."""

    heads: slice
    first: int  # index of the first slot in each head's row of stored slots
    q_hGTD: Tensor
    k_hSD: Tensor
    v_hSD: Tensor
    offset_hGT: Tensor | None  # added to q.k before scaling
    mask_TS: Tensor | None = None

    def attend(self, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = attend(self.q_hGTD, self.k_hSD, self.v_hSD, scale, mask_TS=self.mask_TS)
        return out, lse if self.offset_hGT is None else lse + self.offset_hGT * scale

    def mass(self, lse_HGT: Tensor, scale: float) -> Tensor:
        """Attention mass [h, S] these slots received, given the log-sum-exp over everything the queries saw."""
        score = self.q_hGTD.float() @ self.k_hSD.float().unsqueeze(1).transpose(-1, -2)
        if self.offset_hGT is not None:
            score += self.offset_hGT.unsqueeze(-1)
        if self.mask_TS is not None:
            score = score.masked_fill(~self.mask_TS, -torch.inf)
        return torch.exp(score * scale - lse_HGT[self.heads].unsqueeze(-1)).sum((1, 2))


def add_stored(merge: Merge, sequence: SequenceCache, layer: int, q_HGTD: Tensor, start: int) -> None:
    """Merge attention to all sealed slots of one layer, for queries at positions start, start + 1, …"""
    scale = sequence.spec.layers[layer].scale
    for stretch in stretches(sequence, layer, q_HGTD, start):
        merge.add(stretch.heads, *stretch.attend(scale))


def stretches(sequence: SequenceCache, layer: int, q_HGTD: Tensor, start: int) -> Iterator[Stretch]:
    """Every sealed slot of one layer, in as few pieces as storage allows."""
    spec = sequence.spec.layers[layer]
    first = [0] * spec.num_kv_heads
    for pages in sequence.layer_parts(layer):
        runs = pages.runs()
        if not runs:
            continue
        if sequence.policy.position.shifts and spec.compressible:
            yield from _shifted(sequence, layer, pages, q_HGTD, first)
        else:
            yield from _plain(spec, pages, q_HGTD, first, sequence.sealed_len, start)
        first = [n + length for n, length in zip(first, pages.lens, strict=True)]


def _plain(
    spec: LayerSpec, pages: LayerPages, q_HGTD: Tensor, first: list[int], sealed_len: int, start: int
) -> Iterator[Stretch]:
    q, offset = _in_basis(pages, q_HGTD)
    done = list(first)
    for run in pages.runs():
        k_ND, v_ND = decode_run(pages, run, "k", q_HGTD.dtype), decode_run(pages, run, "v", q_HGTD.dtype)
        for heads, k_hSD, v_hSD in _views(run, k_ND, v_ND):
            at = done[heads.start]
            stretch = Stretch(heads, at, q[heads], k_hSD, v_hSD, None if offset is None else offset[heads])
            if spec.sliding_window is not None:
                position_S = run.position_N[run.starts[0] :][: k_hSD.shape[1]]
                stretch.mask_TS = _window_mask(spec.sliding_window, q_HGTD.shape[2], start, position_S)
            yield stretch
        for head, length in zip(run.heads, run.lens, strict=True):
            done[head] += length


def _in_basis(pages: LayerPages, q_HGTD: Tensor) -> tuple[Tensor, Tensor | None]:
    q, offset = pages.page_class.k.query(q_HGTD.flatten(1, 2), pages.state.get("k", {}))
    shape = q_HGTD.shape[1:3]
    return q.unflatten(1, shape), None if offset is None else offset.unflatten(1, shape)


def _views(run: Run, k_ND: Tensor, v_ND: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """One [h, S, D] view for all heads of a uniform run, else one per head; never a copy."""
    if run.is_uniform and len(run.heads) == run.heads[-1] - run.heads[0] + 1:
        shape = (len(run.heads), -1, k_ND.shape[-1])
        length = run.lens[0]
        heads = slice(run.heads[0], run.heads[-1] + 1)
        yield heads, k_ND.view(shape)[:, :length], v_ND.view(*shape[:2], v_ND.shape[-1])[:, :length]
        return
    for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
        mine = slice(start, start + length)
        yield slice(head, head + 1), k_ND[mine].unsqueeze(0), v_ND[mine].unsqueeze(0)


def _window_mask(window: int, num_queries: int, start: int, position_S: Tensor) -> Tensor:
    position_T = torch.arange(start, start + num_queries, device=position_S.device)
    return position_S > position_T.unsqueeze(-1) - window


def _shifted(
    sequence: SequenceCache, layer: int, pages: LayerPages, q_HGTD: Tensor, first: list[int]
) -> Iterator[Stretch]:
    """`slot` positions: stored slot i of n appears n - i before the first token that is not sealed."""
    rope = sequence.spec.layers[layer].rope
    assert rope is not None  # checked when the session was made
    totals = sequence.stored_lens(layer)
    done = list(first)
    for run in pages.runs():
        k_ND, v_ND = restored_run(pages, run, "k", q_HGTD.dtype), decode_run(pages, run, "v", q_HGTD.dtype)
        for heads, k_hSD, v_hSD in _views(run, k_ND, v_ND):
            at, length = done[heads.start], k_hSD.shape[1]
            begins = run.starts[run.heads.index(heads.start) :][: len(k_hSD)]
            position_hS = torch.stack([run.position_N[begin : begin + length] for begin in begins]).to(torch.int64)
            first_apparent = sequence.sealed_len - totals[heads.start] + at
            shift_hS = torch.arange(first_apparent, first_apparent + length, device=k_ND.device) - position_hS
            if (shift_hS == shift_hS[0]).all():
                yield from _by_shift(rope, heads, at, q_HGTD, k_hSD, v_hSD, shift_hS[0])
            else:
                yield Stretch(heads, at, q_HGTD[heads], rope.rotate(k_hSD, shift_hS), v_hSD, None)
        for head, length in zip(run.heads, run.lens, strict=True):
            done[head] += length


def _by_shift(
    rope: Rope, heads: slice, at: int, q_HGTD: Tensor, k_hSD: Tensor, v_hSD: Tensor, shift_S: Tensor
) -> Iterator[Stretch]:
    """Split where the shift changes if it changes rarely (sinks and a window), else turn the keys."""
    shift, lengths = torch.unique_consecutive(shift_S, return_counts=True)
    q = q_HGTD[heads]
    if len(shift) > 4:
        yield Stretch(heads, at, q, rope.rotate(k_hSD, shift_S), v_hSD, None)
        return
    begin = 0
    for value, length in zip(shift.tolist(), lengths.tolist(), strict=True):
        mine = slice(begin, begin + length)
        turned = q if value == 0 else rope.rotate(q, torch.tensor(-value, device=q.device))
        yield Stretch(heads, at + begin, turned, k_hSD[:, mine], v_hSD[:, mine], None)
        begin += length
