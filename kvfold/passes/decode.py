"""A decode step: one new token, or a draft, for each sequence of a batch, over KV pages and open block.

The open block is sealed at the start of the step that would not fit, so OutOfPages is raised before the step
has changed anything. New slots are written behind the fill and count once they are kept; what scorers observe of a
token is recorded after the model has run, so that a rejected draft changes nothing.

    H KV heads   G query heads per KV head   Q query heads   T tokens   N packed tokens   B rows of a call
    D head dim   R open block
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.attend.lse_merge import LseMerge, attend, compute_dtype
from kvfold.attend.paged import merge_paged
from kvfold.compression.observe import ObserverNeeds, new_mass, observe_queries, stored_mass
from kvfold.compression.seal import seal_all
from kvfold.core import HAS_NUMBA
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.context_window import warn_if_passing
from kvfold.passes.cpu_batch import CpuBatch, Row, row_of

if TYPE_CHECKING:
    from kvfold.passes.cpu_step import AttentionState, CpuStep


@dataclass(frozen=True)
class _Seen:
    """What scorers may want to know of the new tokens of one sequence in one layer."""

    layer: int
    q_QTD: Tensor
    q_HGTD: Tensor
    lse_HGT: Tensor


class DecodePass:
    """New tokens for every sequence, one number for all or one for each; they are committed by the caller."""

    @classmethod
    def begin(cls, sequences: Sequence[SequenceCache], num_tokens: int | Sequence[int] = 1) -> DecodePass:
        """Seal the open blocks that have no room for the new tokens, which may evict, and start a step."""
        lens = [num_tokens] * len(sequences) if isinstance(num_tokens, int) else list(num_tokens)
        full = []
        for sequence, length in zip(sequences, lens, strict=True):
            sequence.check_whole()
            if sequence.loading is not None:
                sequence.wait_loaded()
            if sequence.open.num_slots - sequence.open.fill < length:
                full.append(sequence)
        if full:
            seal_all(full)
        for sequence, length in zip(sequences, lens, strict=True):
            if sequence.sealed_len + sequence.open.fill + length > sequence.spec.max_positions:
                warn_if_passing(sequence, length)
        return cls(sequences, lens)

    def __init__(self, sequences: Sequence[SequenceCache], num_tokens: Sequence[int]) -> None:
        self.sequences, self.num_tokens = list(sequences), list(num_tokens)
        self._base = [sequence.open.fill for sequence in self.sequences]
        self._cpu_batch = CpuBatch(self.sequences)
        self._seen: dict[int, list[_Seen]] = defaultdict(list)  # by sequence, as are the tokens observed
        self._num_observed: dict[int, int] = defaultdict(int)

    @cached_property
    def _needs(self) -> list[ObserverNeeds]:
        """Lazy: kernels do not use it."""
        return [ObserverNeeds.of([sequence.policy], decoding=True) for sequence in self.sequences]

    @property
    def observing(self) -> list[SequenceCache]:
        """Sequences whose observer state the step changes."""
        return [one for one, needs in zip(self.sequences, self._needs, strict=True) if needs.anything]

    @cached_property
    def _compiled(self) -> CpuStep | None:
        """Kernels for the sequences that they can read, where numba is installed."""
        if not HAS_NUMBA or max(self.num_tokens) > 1:
            return None
        from kvfold.passes.cpu_step import CpuStep

        return CpuStep.over(self.sequences)

    def all_layers(self) -> AttentionState | None:
        """For a kernel that runs all layers in one call; None where it cannot read all that is stored, or scorers want
        to know what it saw."""
        compiled = self._compiled
        if compiled is None or len(compiled.indices) < len(self.sequences) or self.observing:
            return None
        return compiled.all_layers()

    def attend_packed(self, layer: int, q_QND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
        """The tokens of all sequences, one behind the other; returns the attention output [N, Q, D]."""
        out_NQD = torch.empty_like(q_QND.transpose(0, 1))
        on_cpu = q_QND.device.type == "cpu"
        compiled = self._compiled if on_cpu else None
        done = self._attend_compiled(layer, compiled, (q_QND, k_HND, v_HND), out_NQD) if compiled else ()
        if len(done) == len(self.sequences):
            return out_NQD
        rows = self._rows(layer, done) if on_cpu else {}
        starts = [0, *accumulate(self.num_tokens)]
        for index, mine in enumerate(map(slice, starts, starts[1:])):
            if index not in rows and index not in done:
                new = q_QND[:, mine], k_HND[:, mine], v_HND[:, mine]
                out_NQD[mine] = self.attend(layer, index, *new).transpose(0, 1)
        if rows:
            self._attend_batched(layer, rows, q_QND, (k_HND, v_HND), out_NQD)
        return out_NQD

    def _attend_compiled(
        self, layer: int, compiled: CpuStep, new: tuple[Tensor, Tensor, Tensor], out_NQD: Tensor
    ) -> Sequence[int]:
        """The sequences that kernels have read in this layer."""
        if not compiled.serves(layer):
            return ()
        spec, is_whole = self.sequences[0].spec.layers[layer], len(compiled.indices) == len(self.sequences)
        mine = [x.transpose(0, 1) if is_whole else x.transpose(0, 1)[compiled.index_B] for x in new]
        out_BQD, lse_BHG = compiled.attend(layer, *mine)
        if is_whole:
            out_NQD.copy_(out_BQD)
        else:
            out_NQD[compiled.index_B] = out_BQD.to(out_NQD.dtype)
        for at, index in enumerate(compiled.indices):
            if self._needs[index].anything and spec.compressible:
                q_QTD = new[0][:, index : index + 1]
                q_HGTD = q_QTD.float().unflatten(0, (spec.num_kv_heads, spec.group))
                self._seen[index].append(_Seen(layer, q_QTD, q_HGTD, lse_BHG[at].unsqueeze(2)))
        return compiled.indices

    def _rows(self, layer: int, done: Sequence[int]) -> dict[int, Row]:
        """Sequences whose only new token can be read together with those of others, by their index."""
        if max(self.num_tokens) > 1:
            return {}
        found = {index: row_of(one, layer) for index, one in enumerate(self.sequences) if index not in done}
        return {index: row for index, row in found.items() if row is not None}

    def _attend_batched(
        self, layer: int, rows: dict[int, Row], q_QND: Tensor, new: tuple[Tensor, Tensor], out_NQD: Tensor
    ) -> None:
        spec = self.sequences[0].spec.layers[layer]
        k_HTD, v_HTD = (x_HND.unsqueeze(2).unbind(1) for x_HND in new)
        for index in rows:
            self.sequences[index].open.write(layer, k_HTD[index], v_HTD[index])
        q_NHGD = q_QND.transpose(0, 1).to(compute_dtype(q_QND)).unflatten(1, (spec.num_kv_heads, spec.group))
        for call in self._cpu_batch.calls(layer, rows):
            call.fill([x for index in call.rows for x in self._slots(layer, index, rows[index])])
            q_BHGD = q_NHGD[call.index_B]
            out_BHGD, lse_BHG = call.attend(q_BHGD, spec.scale)
            out_NQD[call.index_B] = out_BHGD.flatten(1, 2).to(out_NQD.dtype)
            for at, index in enumerate(call.rows):
                if self._needs[index].anything and spec.compressible:
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
        merge = LseMerge(q_HGTD)
        merge_paged(merge, sequence, layer, q_HGTD, sequence.logical_len)
        end = block.fill + q_QTD.shape[1]
        k, v = block.k[layer][:, :end].to(dtype), block.v[layer][:, :end].to(dtype)
        mask_TS = None
        if q_QTD.shape[1] > 1 or (spec.sliding_window or end) < end:
            query = torch.arange(block.fill, end, device=k.device).unsqueeze(-1)
            slot = torch.arange(end, device=k.device)
            mask_TS = (slot <= query) & (slot > query - (spec.sliding_window or end))
        merge.add(slice(0, spec.num_kv_heads), *attend(q_HGTD, k, v, spec.scale, mask_TS=mask_TS))
        if self._needs[index].anything and spec.compressible:
            assert merge.lse_HGT is not None
            self._seen[index].append(_Seen(layer, q_QTD, q_HGTD, merge.lse_HGT))
        return merge.result().flatten(0, 1).to(q_QTD.dtype)

    def observe(self, index: int, num_tokens: int) -> None:
        """Update the observer state with the first `num_tokens` new tokens of a sequence, once each."""
        begin = self._num_observed[index]
        if num_tokens > begin:
            for seen in self._seen[index]:
                self._observe(index, seen, slice(begin, num_tokens))
            self._num_observed[index] = num_tokens

    def _observe(self, index: int, seen: _Seen, new: slice) -> None:
        sequence, needs, layer = self.sequences[index], self._needs[index], seen.layer
        state, block, fill = sequence.observed.layers[layer], sequence.open, self._base[index] + new.start
        start = sequence.sealed_len + fill
        observe_queries(sequence, layer, seen.q_QTD[:, new], start, needs)
        if needs.mass:
            q_HGTD, lse_HGT = seen.q_HGTD[:, :, new], seen.lse_HGT[:, :, new]
            old = stored_mass(sequence, layer, q_HGTD, lse_HGT, start)
            state.mass_HS = old if state.mass_HS is None else state.mass_HS + old
            k_HSD = block.k[layer][:, : self._base[index] + new.stop].to(q_HGTD.dtype)
            mass = new_mass(q_HGTD, k_HSD, lse_HGT, sequence.spec.layers[layer].scale, fill)
            if state.open_mass_HR is not None:  # past the fill stands what drafts that rolled back had received
                mass[:, :fill] += state.open_mass_HR[:, :fill]
            state.open_mass_HR = functional.pad(mass, (0, block.num_slots - mass.shape[1]))

    def observe_all(self) -> None:
        """Update the observer state with all tokens."""
        for index in self._seen:
            self.observe(index, self.num_tokens[index])

    def finish(self) -> None:
        """Keep all tokens. Observing may be interrupted, counting not, so it comes last."""
        self.observe_all()
        for sequence, length in zip(self.sequences, self.num_tokens, strict=True):
            sequence.open.advance(length)
