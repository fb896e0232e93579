"""Crop: remove the newest tokens of a sequence after they were sealed, such as rejected drafts.

Slots keep their original positions, so the slots of the tokens that go are the last ones of every head. What the
compression decided while those tokens were there stays decided.
"""

from __future__ import annotations

import torch
from torch.nn.utils.rnn import pad_sequence

from kvfold.errors import InputError
from kvfold.pages.change import LayerChange
from kvfold.pages.compaction import rewrite
from kvfold.pages.sequence import SequenceCache


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
    changes = [_change(sequence, layer, length) for layer in range(sequence.spec.num_layers)]
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


def _change(sequence: SequenceCache, layer: int, length: int) -> LayerChange:
    """Nothing new, and of the stored slots those before `length`."""
    spec, device = sequence.spec.layers[layer], sequence.arena.device
    heads = range(spec.num_kv_heads)
    parts = sequence.layer_parts(layer)
    position_HS = [torch.cat([part.positions(head) for part in parts]) for head in heads]
    keep = [(position_S < length).nonzero().flatten().to(device) for position_S in position_HS]
    empty = torch.empty(0, spec.head_dim, dtype=sequence.spec.kv_dtype, device=device)
    return LayerChange(empty, empty, torch.empty(0, dtype=torch.int32, device=device), [0] * len(heads), keep)
