"""Sealing: quantise the committed slots of an open block (residual buffer) and append them to the KV pages.

While decoding, slots are evicted here if the policy's decode trigger fires; it reads host counters, so no step waits
for the device. Blocks of many sequences that evict nothing are sealed in one kernel launch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional

from kvfold.attend.lse_merge import compute_dtype
from kvfold.compression.observe import joined_mass
from kvfold.compression.round import CompressionRound, decode_target
from kvfold.compression.view import NewSlots
from kvfold.errors import OutOfPages
from kvfold.pages.append import lacks_room, num_ahead
from kvfold.pages.kernels.batch_seal import can_seal, expect_seal, reserve_pages_ahead, seal_blocks
from kvfold.pages.sequence import SequenceCache
from kvfold.triggers import Counters


def seal_all(sequences: Sequence[SequenceCache]) -> None:
    """Seal many; those that evict nothing in one launch, if kernels know their codecs."""
    together: list[SequenceCache] = []
    alone: list[SequenceCache] = []
    for sequence in sequences:
        (together if can_seal(sequence) and not _due(sequence) else alone).append(sequence)
    seal_blocks(together)
    for sequence in alone:
        seal(sequence)


def prepare_seals(sequences: Sequence[SequenceCache]) -> None:
    """Allocate pages ahead for some of the blocks that will seal, if that evicts nothing: a few per step, while the
    device works, instead of all at once. The tokens of the running step are not counted yet."""
    waiting = [sequence for sequence in sequences if lacks_room(sequence) and _grows(sequence)]
    waiting.sort(key=lambda sequence: sequence.open.room)
    try:
        for sequence in waiting[: num_ahead([sequence.open.room for sequence in waiting])]:
            reserve_pages_ahead(sequence)
    except OutOfPages:
        return  # the seal raises it, if nothing is free by then
    last = [sequence for sequence in sequences if sequence.open.fill == sequence.open.num_slots - 1]
    expect_seal([sequence for sequence in last if _grows(sequence)])


def _grows(sequence: SequenceCache) -> bool:
    """Whether kernels seal it, nothing is evicted, and new pages change no position."""
    return can_seal(sequence) and not sequence.policy.decode.may_evict and not sequence.policy.position.shifts


def seal(sequence: SequenceCache, *, compress: bool = True) -> None:
    """Move the committed slots of the open block into pages; evict if the decode trigger fires."""
    block = sequence.open
    num_tokens = block.committed
    if num_tokens == 0:
        return
    stage = sequence.policy.decode if compress and _due(sequence) else None
    compression = CompressionRound(sequence, stage, sequence.committed_len, decoding=True)
    for layer in range(sequence.spec.num_layers):
        dtype = compute_dtype(block.k[layer])
        k, v = block.k[layer][:, :num_tokens].to(dtype), block.v[layer][:, :num_tokens].to(dtype)
        compression.add_layer(layer, NewSlots(k, v, sequence.sealed_len, _sealed_mass(sequence, layer, num_tokens)))
    compression.finish(num_tokens)
    block.drop_committed()
    for state in sequence.observed.layers:
        if state.open_mass_HR is not None:  # drafts moved to the front, and their mass with them
            state.open_mass_HR = functional.pad(state.open_mass_HR[:, num_tokens:], (0, num_tokens))


def _due(sequence: SequenceCache) -> bool:
    """Whether the decode trigger fires, by host counters."""
    stage = sequence.policy.decode
    if not stage.may_evict:
        return False
    lens = [length for i in sequence.spec.compressible_layers for length in sequence.stored_lens(i)]
    counters = Counters(
        stored_len=-(-sum(lens) // max(len(lens), 1)) + sequence.open.num_slots + sequence.open.committed,
        target_len=decode_target(sequence),
        since_last=sequence.committed_len - sequence.last_compressed_len,
    )
    return stage.when.due(counters)


def _sealed_mass(sequence: SequenceCache, layer: int, num_tokens: int) -> Tensor | None:
    """Mass of stored slots, then of the open block's."""
    state = sequence.observed.layers[layer]
    if state.open_mass_HR is None:
        return None
    old_HS = state.mass_HS if state.mass_HS is not None else state.open_mass_HR[:, :0]
    return joined_mass(sequence, layer, old_HS, state.open_mass_HR[:, :num_tokens])
