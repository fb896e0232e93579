"""A prefill pass, of a whole prompt or of a chunk (chunked prefill): new tokens attend to the KV cache and themselves.

The model runs a layer over all tokens (in pieces) before the next. Under eviction a layer's keys and values exist only
while it runs: then its slots are scored and all but the selected ones dropped. The result is that of a one-shot
prefill, at the memory of one layer. Chunked prefill runs one pass per chunk of the prompt.

    H KV heads   G query heads per KV head   Q query heads   T tokens   D head dim
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from kvfold.attend.cpu_attention import cpu_attention
from kvfold.attend.lse_merge import LseMerge, attend, compute_dtype
from kvfold.attend.paged import merge_paged
from kvfold.attend.stored_parts import LENGTH, StoredParts, part_of, reads_head_dim, stored_parts
from kvfold.codec.base import SIDES
from kvfold.compression.full_prompt import FullPrompt
from kvfold.compression.joined import select_joined
from kvfold.compression.observe import ObserverNeeds, joined_mass, new_mass, observe_queries, stored_mass
from kvfold.compression.round import CompressionRound, check_decode_size, finish_all
from kvfold.compression.seal import seal
from kvfold.compression.token_pruning import PrunedTokens
from kvfold.compression.view import NewSlots
from kvfold.core import HAS_AVX512_KERNELS, LayerSpec, has_amx_kernels
from kvfold.evicted.base import CalibrationTargets
from kvfold.pages.async_copy import upload
from kvfold.pages.layer import LayerChange
from kvfold.pages.observer_state import LayerObserverState
from kvfold.pages.read import can_join, room_behind
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.context_window import warn_if_passing
from kvfold.passes.joined_attention import PaddedBatch, attend_padded
from kvfold.score.base import Replay
from kvfold.yielding import yield_point

if TYPE_CHECKING:
    from kvfold.passes.cpu_extend import ExtendState  # which needs numba


@dataclass
class LayerBuffer:
    """Keys, values and mass of the running layer, for one sequence; behind a lossless prefix, if there is one, that was
    copied in front of them or is read where it is stored."""

    joined_k_HSD: Tensor
    joined_v_HSD: Tensor
    num_joined: int = 0  # slots in front of the new ones
    filled: int = 0
    stored_mass_HS: Tensor | None = None
    new_mass_HT: Tensor | None = None
    queries: list[Tensor] = field(default_factory=list)  # [Q, T, D] of each chunk, if a scorer needs all queries
    stored: StoredParts | None = None

    @classmethod
    def empty(cls, num_tokens: int, k_HTD: Tensor, v_HTD: Tensor, dtype: torch.dtype) -> LayerBuffer:
        """Room for so many tokens of this kind."""
        k = torch.empty(k_HTD.shape[0], num_tokens, k_HTD.shape[2], dtype=dtype, device=k_HTD.device)
        return cls(k, torch.empty_like(k[..., : v_HTD.shape[2]]))

    @classmethod
    def behind(cls, sequence: SequenceCache, layer: int, num_tokens: int, dtype: torch.dtype) -> LayerBuffer:
        """Room for so many tokens behind stored ones."""
        k_HSD, v_HSD = (room_behind(sequence, layer, side, num_tokens, dtype) for side in SIDES)
        return cls(k_HSD, v_HSD, sequence.sealed_len)

    @property
    def k_HTD(self) -> Tensor:
        return self.joined_k_HSD[:, self.num_joined :]

    @property
    def v_HTD(self) -> Tensor:
        return self.joined_v_HSD[:, self.num_joined :]

    def append(self, k_HTD: Tensor, v_HTD: Tensor) -> None:
        offset, self.filled = self.filled, self.filled + k_HTD.shape[1]
        self.k_HTD[:, offset : self.filled] = k_HTD
        self.v_HTD[:, offset : self.filled] = v_HTD


class _Extended(NamedTuple):
    """Sequences whose new tokens a kernel runs through all layers."""

    state: ExtendState
    indices: list[int]
    lens: list[int]  # of new tokens
    stored: list[StoredParts]  # layer by layer


class PrefillPass:
    """`num_tokens[i]` new tokens for sequence i. With `compress`, sizes refer to `seen_lens[i]`, the committed length
    at the end of the call this pass belongs to; without, everything new is kept.

    `followers` are empty sequences of other policies that read what an (empty) first sequence reads, and prune the same
    tokens: attention is computed once, compression once for each.
    """

    @classmethod
    def begin(
        cls,
        sequences: Sequence[SequenceCache],
        num_tokens: Sequence[int],
        seen_lens: Sequence[int] | None = None,
        *,
        compress: bool = True,
        followers: Sequence[SequenceCache] = (),
    ) -> Self:
        """Seal the open blocks, start a pass, and allocate pages for full prompts that await a replay."""
        seen = seen_lens or [s.committed_len + n for s, n in zip(sequences, num_tokens, strict=True)]
        for sequence, length, new in zip(sequences, seen, num_tokens, strict=True):
            sequence.check_whole()
            if compress:
                check_decode_size(sequence, length)
            seal(sequence, compress=False)
            warn_if_passing(sequence, new)
        found = cls(sequences, num_tokens, seen, compress=compress, followers=followers)
        found._hold_prompts()
        return found

    def __init__(
        self,
        sequences: Sequence[SequenceCache],
        num_tokens: Sequence[int],
        seen_lens: Sequence[int],
        *,
        compress: bool,
        followers: Sequence[SequenceCache],
    ) -> None:
        self.sequences = list(sequences)
        self.num_tokens = list(num_tokens)
        self.followers = [(other, CompressionRound(other, other.policy.prefill, num_tokens[0])) for other in followers]
        self._needs = [ObserverNeeds.of([s.policy, *(f.policy for f in followers)], decoding=False) for s in sequences]
        self.rounds = [
            CompressionRound(sequence, sequence.policy.prefill if compress else None, length)
            for sequence, length in zip(sequences, seen_lens, strict=True)
        ]
        self._buffers: list[LayerBuffer | None] = [None] * len(sequences)
        self.pruned = PrunedTokens(self.sequences, self.num_tokens, whole=not compress)
        self._dtype = torch.float32
        self._through: set[int] = set()  # sequences that have run the layer at once and keep all of it
        self._padded: dict[tuple[int, ...], PaddedBatch] = {}  # of joined calls: all layers have the same
        self._positions: dict[tuple[int, int, int], Tensor] = {}
        self._extended: _Extended | None = None
        self.full_prompts: dict[int, FullPrompt] = {}

    def _hold_prompts(self) -> None:
        """Pages for the full prompt of every sequence whose compression awaits a replay."""
        try:
            for index, sequence in enumerate(self.sequences):
                if self.awaiting_replay(index):
                    self.full_prompts[index] = FullPrompt(sequence, self.num_tokens[index])
        except BaseException:
            self.release()
            raise

    def awaiting_replay(self, index: int) -> list[CompressionRound]:
        """Rounds over this sequence's tokens that await a replay."""
        return [round_ for round_ in self._rounds_of(index) if round_.replay is not None]

    @property
    def needs_surprise(self) -> bool:
        """Whether a replay weighs queries by the surprise of their tokens."""
        replays = (round_.replay for index in self.full_prompts for round_ in self.awaiting_replay(index))
        return any(replay is not None and replay.surprise for replay in replays)

    def _rounds_of(self, index: int) -> list[CompressionRound]:
        """Rounds over a sequence's tokens: its own, and those of its followers."""
        return [*(compression for _, compression in self.followers if index == 0), self.rounds[index]]

    def attend(self, layer: int, index: int, q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Tensor:
        """The next tokens of sequence `index` in this layer; returns the attention output [Q, T, D]. Of the last layer
        there may be fewer queries, those of the last tokens, or none."""
        sequence, dtype = self.sequences[index], compute_dtype(q_QTD)
        self._dtype = dtype
        buffer = self._buffer(index, layer, k_HTD, v_HTD, dtype)
        offset = buffer.filled + k_HTD.shape[1] - q_QTD.shape[1]  # of the first query
        # What attention sees is what will be stored: rounded to the cache's dtype once, here.
        buffer.append(k_HTD.to(sequence.spec.kv_dtype), v_HTD.to(sequence.spec.kv_dtype))
        out_QTD = self._attend(layer, index, q_QTD.to(dtype), buffer, offset) if q_QTD.shape[1] else q_QTD
        if buffer.filled == self.pruned.num_running[index]:
            self._select(index, layer, buffer)
        return out_QTD.to(q_QTD.dtype)

    def _attend(self, layer: int, index: int, q_QTD: Tensor, buffer: LayerBuffer, offset: int) -> Tensor:
        sequence = self.sequences[index]
        spec = sequence.spec.layers[layer]
        q_HGTD = q_QTD.unflatten(0, (spec.num_kv_heads, spec.group))
        merge = LseMerge(q_HGTD)
        if buffer.stored is not None:
            merge_behind_stored(merge, q_HGTD, buffer, buffer.stored, spec.scale, sequence.spec.is_bf16)
        else:
            if not buffer.num_joined:
                merge_paged(merge, sequence, layer, q_HGTD, sequence.sealed_len + offset, whole=True)
            merge_new(merge, q_HGTD, buffer, offset, spec, is_bf16=sequence.spec.is_bf16)
        self._observe(index, layer, q_QTD, q_HGTD, merge, buffer, offset)
        return merge.result().flatten(0, 1)

    def num_observed(self, index: int, num_tokens: int) -> int:
        """Of so many next tokens, the last ones whose queries scorers want to know."""
        needs = self._needs[index]
        if needs.mass or needs.query_stats or needs.new_queries:
            return num_tokens
        return min(num_tokens, needs.last_queries)

    def attend_joined(
        self, layer: int, indices: Sequence[int], lens: Sequence[int], q_QND: Tensor, k_HND: Tensor, v_HND: Tensor
    ) -> Tensor | None:
        """The attention output [Q, N, D] of several sequences that begin with these tokens, or go on with them behind
        one stored prefix, one behind the other; None where one of them has to run alone."""
        spec, dtype = self.sequences[indices[0]].spec.layers[layer], compute_dtype(q_QND)
        if spec.sliding_window is not None and max(lens) > spec.sliding_window:
            return None
        if not all(self._has_whole(index, length) for index, length in zip(indices, lens, strict=True)):
            return None
        is_behind = any(self.sequences[index].logical_len for index in indices)
        if is_behind or all(self.rounds[index].joins_with is None for index in indices):
            found = self._attend_behind(layer, indices, lens, q_QND, k_HND, v_HND)
            if found is not None or is_behind:
                return found
        padded = self._padded.get(tuple(lens)) or PaddedBatch(tuple(lens), q_QND.device)
        self._padded[padded.lens] = padded
        self._dtype, kv_dtype = dtype, self.sequences[indices[0]].spec.kv_dtype
        k_BHTD, v_BHTD = (padded.padded(x_HND.to(kv_dtype).to(dtype)) for x_HND in (k_HND, v_HND))
        q_BQTD = padded.padded(q_QND.to(dtype))
        read = torch.bfloat16 if self.sequences[indices[0]].spec.is_bf16 and has_amx_kernels() else dtype
        out_BQTD = attend_padded(q_BQTD.to(read), k_BHTD.to(read), v_BHTD.to(read), spec.scale)
        num_heads, joined = k_HND.shape[0], self._select_joined(layer, indices, lens, k_BHTD, v_BHTD)
        self._through |= joined
        if len(joined) == len(indices):
            return padded.packed(out_BQTD).to(q_QND.dtype)
        each = (padded.by_sequence(x_BHTD) for x_BHTD in (k_BHTD, v_BHTD))
        for index, length, k_ND, v_ND in zip(indices, lens, *each, strict=True):
            if index not in joined:
                self._select_alone(index, layer, k_ND, v_ND, padded.positions(length, num_heads))
        return padded.packed(out_BQTD).to(q_QND.dtype)

    def _select_alone(self, index: int, layer: int, k_ND: Tensor, v_ND: Tensor, position_N: Tensor) -> None:
        """From all tokens of a sequence, head after head."""
        num_heads = self.sequences[index].spec.layers[layer].num_kv_heads
        length = len(k_ND) // num_heads
        if self._keeps_whole(index, layer):
            self.rounds[index].keep_whole(LayerChange(k_ND, v_ND, position_N, [length] * num_heads))
            self._through.add(index)
            return
        k_HTD, v_HTD = (x_ND.unflatten(0, (num_heads, length)) for x_ND in (k_ND, v_ND))
        self._buffers[index] = buffer = LayerBuffer(k_HTD, v_HTD, 0, length)
        self._select(index, layer, buffer)

    def _attend_behind(
        self, layer: int, indices: Sequence[int], lens: Sequence[int], q_QND: Tensor, k_HND: Tensor, v_HND: Tensor
    ) -> Tensor | None:
        """Of sequences that share all their segments, or begin, where a kernel reads all of them in one call."""
        sequences = [self.sequences[index] for index in indices]
        stored = self._shared_parts(layer, sequences)
        if stored is None or k_HND.shape != v_HND.shape:
            return None
        call = cpu_attention(k_HND.shape[-1], sequences[0].spec.is_bf16)
        assert call.attend_behind is not None
        self._dtype = dtype = compute_dtype(q_QND)
        spec, kv_dtype = sequences[0].spec.layers[layer], sequences[0].spec.kv_dtype
        k_HND, v_HND = (x_HND.to(kv_dtype).to(dtype).contiguous() for x_HND in (k_HND, v_HND))
        parts = [part.split(lens, dim=1) for part in (k_HND, v_HND)]
        part_SHP4 = np.stack(
            [np.concatenate((stored.part_HP4, part_of(*own)), axis=1) for own in zip(*parts, strict=True)]
        )
        q_HGND = q_QND.to(dtype).unflatten(0, (spec.num_kv_heads, spec.group))
        num_shared, between = sequences[0].sealed_len, (k_HND.stride(1), v_HND.stride(1))
        out_HGND = call.attend_behind(q_HGND, lens, part_SHP4, num_shared, spec.scale, between)
        for index, length, k_HTD, v_HTD in zip(indices, lens, *parts, strict=True):
            position_N = self._positions_behind(num_shared, length, spec.num_kv_heads)
            self._select_alone(index, layer, k_HTD.flatten(0, 1), v_HTD.flatten(0, 1), position_N)
        return out_HGND.flatten(0, 1).to(q_QND.dtype)

    def all_layers(self, indices: Sequence[int], lens: Sequence[int]) -> ExtendState | None:
        """For a kernel that runs all layers in one call over the new tokens of all sequences, which stand behind one
        stored prefix or begin; None where it cannot."""
        sequences = [self.sequences[index] for index in indices]
        spec = sequences[0].spec
        if len(indices) < len(self.sequences) or any(sequence.policy.token_pruning.prunes for sequence in sequences):
            return None
        if not all(self._has_whole(index, length) for index, length in zip(indices, lens, strict=True)):
            return None
        if len({(one.num_kv_heads, one.head_dim) for one in spec.layers}) > 1:
            return None
        layers = []
        for layer in range(spec.num_layers):
            stored = self._shared_parts(layer, sequences)
            if stored is None:
                return None
            layers.append(stored)
        from kvfold.passes.cpu_extend import extend_state

        state = extend_state(spec, lens, layers, sequences[0].sealed_len)
        if state is not None:
            self._extended, self._dtype = _Extended(state, list(indices), list(lens), layers), torch.float32
        return state

    def take_layer(self, layer: int) -> None:
        """What the kernel of all layers found: keys and values of this layer."""
        found = self._extended
        assert found is not None
        for index, length, end in zip(found.indices, found.lens, accumulate(found.lens), strict=True):
            k_HTD, v_HTD = found.state.new(layer, slice(end - length, end))
            position_N = self._positions_behind(self.sequences[index].sealed_len, length, len(k_HTD))
            self._select_alone(index, layer, k_HTD.flatten(0, 1), v_HTD.flatten(0, 1), position_N)

    def _shared_parts(self, layer: int, sequences: Sequence[SequenceCache]) -> StoredParts | None:
        """The stored slots that are all that each of the sequences has, where a kernel reads them for all in one call;
        None where not."""
        first = sequences[0]
        spec = first.spec.layers[layer]
        if not HAS_AVX512_KERNELS or first.arena.device.type != "cpu" or spec.sliding_window is not None:
            return None
        if cpu_attention(spec.head_dim, first.spec.is_bf16).attend_behind is None:
            return None
        if not any(sequence.logical_len for sequence in sequences):
            return StoredParts(np.zeros((spec.num_kv_heads, 0, 4), dtype=np.int64), [])
        for sequence in sequences:
            sequence.wait_loaded(layer)
            if list(map(id, sequence.segments)) != list(map(id, first.segments)) or not can_join(sequence, layer):
                return None
        pages = first.layer_parts(layer)[: None if len(sequences) == 1 else -1]  # a tail is of one sequence alone
        stored = stored_parts(pages, first.spec.kv_dtype) if pages else None
        is_all = stored is not None and (stored.part_HP4[:, :, LENGTH].sum(1) == first.sealed_len).all()
        return stored if is_all and all(sequence.sealed_len == first.sealed_len for sequence in sequences) else None

    def _positions_behind(self, first: int, length: int, num_heads: int) -> Tensor:
        """int64 [heads * tokens]; all layers have the same."""
        key = first, length, num_heads
        if key not in self._positions:
            self._positions[key] = torch.arange(first, first + length).repeat(num_heads)
        return self._positions[key]

    def _select_joined(
        self, layer: int, indices: Sequence[int], lens: Sequence[int], k_BHTD: Tensor, v_BHTD: Tensor
    ) -> set[int]:
        """Select for all that can do so with others; returns those for which it is done."""
        groups = defaultdict(list)  # places among these sequences
        for place, index in enumerate(indices):
            if (key := self.rounds[index].joins_with) is not None and self._selects_for_itself(index, layer):
                groups[key].append(place)
        for places in groups.values():
            mine = [self.rounds[indices[place]] for place in places], [lens[place] for place in places]
            if len(places) == len(indices):
                select_joined(layer, *mine, k_BHTD, v_BHTD)
            else:
                place_B = upload(places, k_BHTD.device)
                select_joined(layer, *mine, k_BHTD[place_B], v_BHTD[place_B])
        return {indices[place] for places in groups.values() for place in places}

    def _keeps_whole(self, index: int, layer: int) -> bool:
        """Whether all that a sequence begins with in this layer is kept, and nobody else selects from it."""
        return self.rounds[index].budget is None and self._selects_for_itself(index, layer)

    def _selects_for_itself(self, index: int, layer: int) -> bool:
        """Whether nobody else selects from what a sequence has in this layer, and all of it competes."""
        sequence, is_shared = self.sequences[index], bool(self.followers) or index in self.full_prompts
        return sequence.spec.layers[layer].compressible and not (is_shared or sequence.policy.token_pruning.prunes)

    def _has_whole(self, index: int, num_tokens: int) -> bool:
        """Whether these are all tokens of a sequence in this pass, and nobody observes them."""
        is_whole = self._buffers[index] is None and num_tokens == self.pruned.num_running[index]
        is_loading = not self.sequences[index].logical_len and self.sequences[index].loading is not None
        return is_whole and not is_loading and not self._needs[index].anything

    def _buffer(self, index: int, layer: int, k_HTD: Tensor, v_HTD: Tensor, dtype: torch.dtype) -> LayerBuffer:
        found, num_tokens = self._buffers[index], self.pruned.num_running[index]
        if found is None:
            self.sequences[index].wait_loaded(layer)
            joins = can_join(self.sequences[index], layer)
            stored = self._stored(index, layer, k_HTD) if joins and k_HTD.shape == v_HTD.shape else None
            if joins and stored is None:
                found = LayerBuffer.behind(self.sequences[index], layer, num_tokens, dtype)
            else:
                found = LayerBuffer.empty(num_tokens, k_HTD, v_HTD, dtype)
                found.stored = stored
            self._buffers[index] = found
        return found

    def _stored(self, index: int, layer: int, k_HTD: Tensor) -> StoredParts | None:
        """The prefix in place, where a kernel can read it there."""
        sequence = self.sequences[index]
        is_windowed = sequence.spec.layers[layer].sliding_window is not None
        if not HAS_AVX512_KERNELS or k_HTD.device.type != "cpu" or is_windowed or not reads_head_dim(k_HTD.shape[-1]):
            return None
        return stored_parts(sequence.layer_parts(layer), sequence.spec.kv_dtype)

    def _observe(
        self, index: int, layer: int, q_QTD: Tensor, q_HGTD: Tensor, merge: LseMerge, buffer: LayerBuffer, offset: int
    ) -> None:
        needs, sequence = self._needs[index], self.sequences[index]
        spec = sequence.spec.layers[layer]
        if not needs.anything or not spec.compressible:
            return
        start = sequence.sealed_len + offset
        # Pruning keeps the last tokens: positions are counted back from the end.
        num_pruned = self.num_tokens[index] - self.pruned.num_running[index]
        observe_queries(sequence, layer, q_QTD, start + num_pruned, needs)
        if needs.new_queries:
            buffer.queries.append(q_QTD)
        if needs.mass:
            assert merge.lse_HGT is not None
            old = stored_mass(sequence, layer, q_HGTD, merge.lse_HGT, start, whole=True)
            new = new_mass(q_HGTD, buffer.k_HTD, merge.lse_HGT, spec.scale, offset)
            buffer.stored_mass_HS = old if buffer.stored_mass_HS is None else buffer.stored_mass_HS + old
            buffer.new_mass_HT = new if buffer.new_mass_HT is None else buffer.new_mass_HT + new

    def _select(self, index: int, layer: int, buffer: LayerBuffer) -> None:
        """The last token has attended: score and select. A GPU runs the rest of the layer while the host waits for
        that."""
        sequence = self.sequences[index]
        new = NewSlots(buffer.k_HTD, buffer.v_HTD, sequence.sealed_len)
        new.kept_T, new.num_pruned = self.pruned.kept[index], self.num_tokens[index] - new.num_tokens
        if buffer.stored_mass_HS is not None and buffer.new_mass_HT is not None:
            earlier = sequence.observed.layers[layer].mass_HS
            old_HS = buffer.stored_mass_HS if earlier is None else buffer.stored_mass_HS + earlier
            new.mass_HS = joined_mass(sequence, layer, old_HS, buffer.new_mass_HT)
        if buffer.queries:
            new.q_QTD = torch.cat(buffer.queries, dim=1)
        for other, _ in self.followers:
            seen = sequence.observed.layers[layer]
            other.observed.layers[layer] = LayerObserverState(None, None, seen.last_q_QWD, seen.moments, seen.query_end)
        if index in self.full_prompts:
            self.full_prompts[index].write(layer, new)
        for compression in self._rounds_of(index):
            if not compression.selects_after_replay:
                compression.select(layer, _for_policy(new, compression.sequence))
        self.pruned.score(index, layer, new, self._needs[index].last_queries)

    def select_after_replay(
        self, index: int, replay: Replay, maxima: Sequence[Tensor | None], targets: Sequence[CalibrationTargets | None]
    ) -> None:
        """Select from the full prompt, layer by layer, given the largest weights of a replay and its targets."""
        prompt = self.full_prompts[index]
        for layer, (replay_HGS, answers) in enumerate(zip(maxima, targets, strict=True)):
            yield_point()
            new = replace(prompt.new_slots(layer, self._dtype, replay_HGS), targets=answers)
            for compression in self.awaiting_replay(index):
                if compression.replay == replay:
                    compression.select_after_replay(layer, _for_policy(new, compression.sequence))

    def release(self) -> None:
        """Free the full prompts."""
        for prompt in self.full_prompts.values():
            prompt.release()

    def finish_layer(self, layer: int) -> None:
        """All tokens of all sequences have run this layer: evict."""
        for index, (buffer, total) in enumerate(zip(self._buffers, self.pruned.num_running, strict=True)):
            is_through = index in self._through or (buffer is not None and buffer.filled == total)
            assert is_through, f"sequence {index} is not through layer {layer}"
        for compression in (*self.rounds, *(follower for _, follower in self.followers)):
            compression.evict()
        self._buffers = [None] * len(self.sequences)
        self._through.clear()

    def finish(self) -> None:
        """Encode and write the kept slots. OutOfPages leaves all sequences as they were before the pass."""
        followers = [(compression, self.num_tokens[0]) for _, compression in self.followers]
        finish_all([*zip(self.rounds, self.num_tokens, strict=True), *followers], self.release)


def _for_policy(new: NewSlots, sequence: SequenceCache) -> NewSlots:
    """Without the mass that only another policy of the pass observes."""
    return new if new.mass_HS is None or sequence.policy.observes_mass else new.without_mass


def merge_new(
    merge: LseMerge, q_HGTD: Tensor, buffer: LayerBuffer, offset: int, spec: LayerSpec, *, is_bf16: bool = False
) -> None:
    """Merge attention to the tokens of this pass: earlier chunks whole, the chunk itself causally."""
    scale, window = spec.scale, spec.sliding_window
    every, k_HSD, v_HSD = slice(0, q_HGTD.shape[0]), buffer.joined_k_HSD, buffer.joined_v_HSD
    offset, end = offset + buffer.num_joined, buffer.filled + buffer.num_joined
    if window is not None and end > window:
        begin = max(0, offset - window + 1)
        query = torch.arange(offset, end, device=q_HGTD.device).unsqueeze(-1)
        slot = torch.arange(begin, end, device=q_HGTD.device)
        mask_TS = (slot <= query) & (slot > query - window)
        merge.add(every, *attend(q_HGTD, k_HSD[:, begin:end], v_HSD[:, begin:end], scale, mask_TS=mask_TS))
        return
    merge.add(every, *attend(q_HGTD, k_HSD[:, :end], v_HSD[:, :end], scale, causal=True, is_bf16=is_bf16))


def merge_behind_stored(
    merge: LseMerge, q_HGTD: Tensor, buffer: LayerBuffer, stored: StoredParts, scale: float, is_bf16: bool
) -> None:
    """Merge attention to a prefix, where it is stored, and to the tokens of this pass: as if they were contiguous."""
    new_HP4 = part_of(buffer.k_HTD[:, : buffer.filled], buffer.v_HTD[:, : buffer.filled])
    part_HP4 = np.concatenate((stored.part_HP4, new_HP4), axis=1)
    between = buffer.k_HTD.stride(1), buffer.v_HTD.stride(1)
    call = cpu_attention(q_HGTD.shape[-1], is_bf16)
    merge.add(slice(0, q_HGTD.shape[0]), *call.attend_parts(q_HGTD, part_HP4, scale, between, causal=True))
