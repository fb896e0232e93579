"""A decode step: one new token, or a draft, for each sequence of a batch, read from pages and open block.

The open block is sealed at the start of the step that would not fit, so an arena that is full is told before the step
has changed anything. New slots are written behind the fill and count once they are kept; what scorers observe of a
token is noted after the model has run, so that a rejected draft leaves nothing behind.

    H KV heads   G query heads per KV head   Q query heads   T tokens   N packed tokens   B rows of a call
    D head dim   R open block
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.attend.kernels.sealing import can_seal, expect_seal, find_pages_ahead, seal_blocks
from kvfold.attend.partial import Merge, attend, compute_dtype
from kvfold.attend.reach import warn_if_passing
from kvfold.attend.stored import add_stored
from kvfold.attend.together import Row, Together, row_of
from kvfold.attend.track import Tracked, new_mass, stored_mass, track_queries
from kvfold.errors import OutOfPages
from kvfold.pages.append import lacks_room, num_ahead
from kvfold.pages.compress import Compression, decode_target
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.view import NewSlots
from kvfold.when import Counters


@dataclass(frozen=True)
class _Seen:
    """What scorers may want to know of the new tokens of one sequence in one layer."""

    layer: int
    q_QTD: Tensor
    q_HGTD: Tensor
    lse_HGT: Tensor


class DecodePass:
    """New tokens for every sequence, one number for all or one for each; they are committed by the caller."""

    def __init__(self, sequences: Sequence[SequenceCache], num_tokens: int | Sequence[int] = 1) -> None:
        self.sequences = list(sequences)
        self.num_tokens = [num_tokens] * len(self.sequences) if isinstance(num_tokens, int) else list(num_tokens)
        for sequence in self.sequences:
            if sequence.is_torn:
                raise RuntimeError("an earlier change of this sequence stopped halfway; it can only be released")
            sequence.arrive()
        lanes = list(zip(self.sequences, self.num_tokens, strict=True))
        seal_all([sequence for sequence, length in lanes if sequence.open.room < length])
        for sequence, length in lanes:
            warn_if_passing(sequence, length)
        self._base = [sequence.open.fill for sequence in self.sequences]
        self._together = Together(self.sequences)
        self._seen: dict[int, list[_Seen]] = defaultdict(list)  # by sequence, as are the tokens observed
        self._num_observed: dict[int, int] = defaultdict(int)

    @cached_property
    def _tracked(self) -> list[Tracked]:
        """Not asked for by kernels, which observe nothing."""
        return [Tracked.of([sequence.policy], decoding=True) for sequence in self.sequences]

    def attend_packed(self, layer: int, q_QND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
        """The tokens of all sequences, one behind the other; returns the attention output [N, Q, D]."""
        out_NQD = torch.empty_like(q_QND.transpose(0, 1))
        rows = self._rows(layer) if q_QND.device.type == "cpu" else {}
        starts = [0, *accumulate(self.num_tokens)]
        for index, mine in enumerate(map(slice, starts, starts[1:])):
            if index not in rows:
                new = q_QND[:, mine], k_HND[:, mine], v_HND[:, mine]
                out_NQD[mine] = self.attend(layer, index, *new).transpose(0, 1)
        if rows:
            self._attend_together(layer, rows, q_QND, (k_HND, v_HND), out_NQD)
        return out_NQD

    def _rows(self, layer: int) -> dict[int, Row]:
        """Sequences whose only new token can be read together with those of others, by their index."""
        if max(self.num_tokens) > 1:
            return {}
        found = {index: row_of(sequence, layer) for index, sequence in enumerate(self.sequences)}
        return {index: row for index, row in found.items() if row is not None}

    def _attend_together(
        self, layer: int, rows: dict[int, Row], q_QND: Tensor, new: tuple[Tensor, Tensor], out_NQD: Tensor
    ) -> None:
        spec = self.sequences[0].spec.layers[layer]
        k_HTD, v_HTD = (x_HND.unsqueeze(2).unbind(1) for x_HND in new)
        for index in rows:
            self.sequences[index].open.write(layer, k_HTD[index], v_HTD[index])
        q_NHGD = q_QND.transpose(0, 1).to(compute_dtype(q_QND)).unflatten(1, (spec.num_kv_heads, spec.group))
        for call in self._together.calls(layer, rows):
            call.fill([x for index in call.rows for x in self._slots(layer, index, rows[index])])
            q_BHGD = q_NHGD[call.index_B]
            out_BHGD, lse_BHG = call.attend(q_BHGD, spec.scale)
            out_NQD[call.index_B] = out_BHGD.flatten(1, 2).to(out_NQD.dtype)
            for at, index in enumerate(call.rows):
                if self._tracked[index].anything and spec.compressible:
                    q_HGTD, lse_HGT = q_BHGD[at].unsqueeze(2), lse_BHG[at].unsqueeze(2)
                    self._seen[index].append(_Seen(layer, q_QND[:, index : index + 1], q_HGTD, lse_HGT))

    def _slots(self, layer: int, index: int, row: Row) -> Iterator[Tensor]:
        """What a call copies of a sequence: its open block with the new token, then its parts."""
        block = self.sequences[index].open
        yield block.k[layer].narrow(1, 0, block.fill + 1)
        yield block.v[layer].narrow(1, 0, block.fill + 1)
        for part in row.parts:
            yield part.k_hSD
            yield part.v_hSD

    def attend(self, layer: int, index: int, q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Tensor:
        sequence = self.sequences[index]
        spec, block = sequence.spec.layers[layer], sequence.open
        block.write(layer, k_HTD, v_HTD)
        dtype = compute_dtype(q_QTD)
        q_HGTD = q_QTD.to(dtype).unflatten(0, (spec.num_kv_heads, spec.group))
        merge = Merge(q_HGTD)
        add_stored(merge, sequence, layer, q_HGTD, sequence.logical_len)
        end = block.fill + q_QTD.shape[1]
        k, v = block.k[layer][:, :end].to(dtype), block.v[layer][:, :end].to(dtype)
        mask_TS = None
        if q_QTD.shape[1] > 1 or (spec.sliding_window or end) < end:
            query = torch.arange(block.fill, end, device=k.device).unsqueeze(-1)
            slot = torch.arange(end, device=k.device)
            mask_TS = (slot <= query) & (slot > query - (spec.sliding_window or end))
        merge.add(slice(0, spec.num_kv_heads), *attend(q_HGTD, k, v, spec.scale, mask_TS=mask_TS))
        if self._tracked[index].anything and spec.compressible:
            assert merge.lse_HGT is not None
            self._seen[index].append(_Seen(layer, q_QTD, q_HGTD, merge.lse_HGT))
        return merge.result().flatten(0, 1).to(q_QTD.dtype)

    def observe(self, index: int, num_tokens: int) -> None:
        """Note for the scorers what the first `num_tokens` new tokens of a sequence asked for, once each."""
        begin = self._num_observed[index]
        if num_tokens > begin:
            for seen in self._seen[index]:
                self._track(index, seen, slice(begin, num_tokens))
            self._num_observed[index] = num_tokens

    def _track(self, index: int, seen: _Seen, new: slice) -> None:
        sequence, tracked, layer = self.sequences[index], self._tracked[index], seen.layer
        side, block, fill = sequence.sidecar.layers[layer], sequence.open, self._base[index] + new.start
        start = sequence.sealed_len + fill
        track_queries(sequence, layer, seen.q_QTD[:, new], start, tracked)
        if tracked.mass:
            q_HGTD, lse_HGT = seen.q_HGTD[:, :, new], seen.lse_HGT[:, :, new]
            old = stored_mass(sequence, layer, q_HGTD, lse_HGT, start)
            side.mass_HS = old if side.mass_HS is None else side.mass_HS + old
            k_HSD = block.k[layer][:, : self._base[index] + new.stop].to(q_HGTD.dtype)
            mass = new_mass(q_HGTD, k_HSD, lse_HGT, sequence.spec.layers[layer].scale, fill)
            if side.open_mass_HR is not None:  # past the fill stands what drafts that rolled back had received
                mass[:, :fill] += side.open_mass_HR[:, :fill]
            side.open_mass_HR = functional.pad(mass, (0, block.num_slots - mass.shape[1]))

    def observe_all(self) -> None:
        """Note what all tokens asked for."""
        for index in self._seen:
            self.observe(index, self.num_tokens[index])

    def finish(self) -> None:
        """All tokens stay. Observing may be interrupted, counting not, so it comes last."""
        self.observe_all()
        for sequence, length in zip(self.sequences, self.num_tokens, strict=True):
            sequence.open.advance(length)


def seal_all(sequences: Sequence[SequenceCache]) -> None:
    """Seal many; those that evict nothing in one launch, where there are kernels for it."""
    together: list[SequenceCache] = []
    alone: list[SequenceCache] = []
    for sequence in sequences:
        (together if can_seal(sequence) and not _due(sequence) else alone).append(sequence)
    seal_blocks(together)
    for sequence in alone:
        seal(sequence)


def prepare_seals(sequences: Sequence[SequenceCache]) -> None:
    """Find pages for some of the blocks that seal in steps to come, where that is known to evict nothing. All would ask
    for theirs at once otherwise; between seals the host has time for a few while the device works. The new tokens of
    the step that it works on are not counted yet."""
    waiting = [sequence for sequence in sequences if lacks_room(sequence) and _grows(sequence)]
    waiting.sort(key=lambda sequence: sequence.open.room)
    try:
        for sequence in waiting[: num_ahead([sequence.open.room for sequence in waiting])]:
            find_pages_ahead(sequence)
    except OutOfPages:
        return  # the seal will say so, if nothing is free by then
    expect_seal([sequence for sequence in sequences if sequence.open.room == 1 and _grows(sequence)])


def _grows(sequence: SequenceCache) -> bool:
    """Whether seals by kernels add slots, and nothing is worked out anew when pages are added."""
    return can_seal(sequence) and not may_evict(sequence) and not sequence.policy.position.shifts


def may_evict(sequence: SequenceCache) -> bool:
    """Whether a seal can be due to evict."""
    return sequence.policy.decode.may_evict


def seal(sequence: SequenceCache, *, compress: bool = True) -> None:
    """Move the committed slots of the open block into pages; evict if the decode trigger says so."""
    block = sequence.open
    num_tokens = block.committed
    if num_tokens == 0:
        return
    stage = sequence.policy.decode if compress and _due(sequence) else None
    compression = Compression(sequence, stage, sequence.committed_len, decoding=True)
    for layer in range(sequence.spec.num_layers):
        dtype = compute_dtype(block.k[layer])
        k, v = block.k[layer][:, :num_tokens].to(dtype), block.v[layer][:, :num_tokens].to(dtype)
        compression.layer(layer, NewSlots(k, v, sequence.sealed_len, _sealed_mass(sequence, layer, num_tokens)))
    compression.finish(num_tokens)
    block.drop_committed()
    for side in sequence.sidecar.layers:
        if side.open_mass_HR is not None:  # drafts moved to the front, and their mass with them
            side.open_mass_HR = functional.pad(side.open_mass_HR[:, num_tokens:], (0, num_tokens))


def _due(sequence: SequenceCache) -> bool:
    """Ask the decode trigger, on host counters."""
    if not may_evict(sequence):
        return False
    stage = sequence.policy.decode
    lens = [length for i in sequence.spec.compressible_layers for length in sequence.stored_lens(i)]
    counters = Counters(
        stored_len=-(-sum(lens) // max(len(lens), 1)) + sequence.open.num_slots + sequence.open.committed,
        target_len=decode_target(sequence),
        since_last=sequence.committed_len - sequence.last_compressed_len,
    )
    return stage.when.due(counters)


def _sealed_mass(sequence: SequenceCache, layer: int, num_tokens: int) -> Tensor | None:
    """Mass of stored slots, then of the open block's, in row order."""
    side = sequence.sidecar.layers[layer]
    if side.open_mass_HR is None:
        return None
    lens = sequence.stored_lens(layer)
    old_HS = side.mass_HS if side.mass_HS is not None else side.open_mass_HR[:, :0]
    rows = [
        torch.cat((old[:length], new[:num_tokens]))
        for old, new, length in zip(old_HS, side.open_mass_HR, lens, strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
