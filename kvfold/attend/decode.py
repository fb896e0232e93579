"""A decode step: one new token for each sequence of a batch, read from pages and open block.

The open block is sealed at the start of the step that would not fit, so an arena that is full is told before the step
has changed anything.

    H KV heads   G query heads per KV head   Q query heads   T tokens   D head dim   R open block
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.attend.partial import Merge, attend, compute_dtype
from kvfold.attend.stored import add_stored
from kvfold.attend.track import Tracked, new_mass, stored_mass, track_queries
from kvfold.pages.compress import Compression
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.view import NewSlots, size_facts
from kvfold.when import Counters


class DecodePass:
    """`num_tokens` tokens (one, or a draft) for every sequence; they are committed by the caller."""

    def __init__(self, sequences: Sequence[SequenceCache], num_tokens: int = 1) -> None:
        self.sequences = list(sequences)
        self.num_tokens = num_tokens
        for sequence in sequences:
            if sequence.open.room < num_tokens:
                seal(sequence)
        self._tracked = [Tracked.of([sequence.policy], decoding=True) for sequence in sequences]

    def attend(self, layer: int, index: int, q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Tensor:
        sequence = self.sequences[index]
        spec, block = sequence.spec.layers[layer], sequence.open
        block.write(layer, k_HTD, v_HTD)
        dtype = compute_dtype(q_QTD)
        q_HGTD = q_QTD.to(dtype).unflatten(0, (spec.num_kv_heads, spec.group))
        merge = Merge(q_HGTD)
        add_stored(merge, sequence, layer, q_HGTD, sequence.logical_len)
        end = block.fill + self.num_tokens
        k, v = block.k[layer][:, :end].to(dtype), block.v[layer][:, :end].to(dtype)
        mask_TS = None
        if self.num_tokens > 1 or (spec.sliding_window or end) < end:
            query = torch.arange(block.fill, end, device=k.device).unsqueeze(-1)
            slot = torch.arange(end, device=k.device)
            mask_TS = (slot <= query) & (slot > query - (spec.sliding_window or end))
        merge.add(slice(0, spec.num_kv_heads), *attend(q_HGTD, k, v, spec.scale, mask_TS=mask_TS))
        if self._tracked[index].anything and spec.compressible:
            self._track(sequence, layer, q_QTD, q_HGTD, k, merge, self._tracked[index])
        return merge.result().flatten(0, 1).to(q_QTD.dtype)

    def _track(
        self,
        sequence: SequenceCache,
        layer: int,
        q_QTD: Tensor,
        q_HGTD: Tensor,
        k_HSD: Tensor,
        merge: Merge,
        tracked: Tracked,
    ) -> None:
        side, block = sequence.sidecar.layers[layer], sequence.open
        track_queries(sequence, layer, q_QTD, sequence.logical_len, tracked)
        if tracked.mass:
            assert merge.lse_HGT is not None
            scale = sequence.spec.layers[layer].scale
            old = stored_mass(sequence, layer, q_HGTD, merge.lse_HGT, sequence.logical_len)
            side.mass_HS = old if side.mass_HS is None else side.mass_HS + old
            new = new_mass(q_HGTD, k_HSD, merge.lse_HGT, scale, block.fill)
            if side.open_mass_HR is not None:  # past the fill stands what drafts that rolled back had received
                new[:, : block.fill] += side.open_mass_HR[:, : block.fill]
            side.open_mass_HR = functional.pad(new, (0, block.num_slots - new.shape[1]))

    def finish(self) -> None:
        for sequence in self.sequences:
            sequence.open.advance(self.num_tokens)


def seal(sequence: SequenceCache, *, compress: bool = True) -> None:
    """Move the committed slots of the open block into pages; evict if the decode trigger says so."""
    block = sequence.open
    num_tokens = block.committed
    if num_tokens == 0:
        return
    stage = sequence.policy.decode if compress and _due(sequence) else None
    compression = Compression(sequence, stage, sequence.committed_len)
    for layer in range(sequence.spec.num_layers):
        dtype = compute_dtype(block.k[layer])
        k, v = block.k[layer][:, :num_tokens].to(dtype), block.v[layer][:, :num_tokens].to(dtype)
        compression.layer(layer, NewSlots(k, v, sequence.sealed_len, _sealed_mass(sequence, layer, num_tokens)))
    compression.finish(num_tokens, decoding=True)
    block.drop_committed()
    for side in sequence.sidecar.layers:
        if side.open_mass_HR is not None:  # drafts moved to the front, and their mass with them
            side.open_mass_HR = functional.pad(side.open_mass_HR[:, num_tokens:], (0, num_tokens))


def _due(sequence: SequenceCache) -> bool:
    """Ask the decode trigger, on host counters."""
    stage = sequence.policy.decode
    if stage.size is None:
        return False
    target = stage.size.slots_per_head(size_facts(sequence, sequence.committed_len))
    stored = max((length for i in sequence.spec.compressible_layers for length in sequence.stored_lens(i)), default=0)
    counters = Counters(
        stored_len=stored + sequence.open.num_slots + sequence.open.committed,
        target_len=target,
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
