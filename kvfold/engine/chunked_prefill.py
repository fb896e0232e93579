"""Chunks of a chunked prefill: a prompt is cut into passes, and each pass into the pieces a layer runs at a time.

Chunk borders are absolute multiples of the chunk length, so a continued sequence runs the same shapes as one prefilled
at once.

    packed tokens:  | sequence 0: piece, piece, … | sequence 1: piece, … |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from kvfold.core import ModelSpec
from kvfold.models.pass_cache import Piece
from kvfold.pages.sequence import SequenceCache


def default_chunk_len(spec: ModelSpec, device: torch.device) -> int:
    """Tokens a layer runs at a time: 8192 on CUDA, which keeps tensor cores busy; 512 on a CPU, and where attention
    materialises a matrix of chunk x KV slots (fp32 on CUDA, sliding-window layers)."""
    fused = spec.dtype in (torch.float16, torch.bfloat16) and len(spec.compressible_layers) == spec.num_layers
    return 8192 if device.type == "cuda" and fused else 512


def passes(
    sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]], compress: bool
) -> Iterator[tuple[list[int], list[list[int]]]]:
    """(sequences, their tokens) of each pass: the whole prompt, or one chunk under a between-chunks policy."""
    left = {i: list(ids) for i, ids in enumerate(tokens)}
    while left:
        batch, parts = [], []
        for i in list(left):
            take = len(left[i])
            chunk_len = sequences[i].policy.prefill.when.chunk_len
            if compress and chunk_len is not None:
                take = chunk_len - sequences[i].committed_len % chunk_len
            batch.append(i)
            parts.append(left[i][:take])
            left[i] = left[i][take:]
            if not left[i]:
                del left[i]
        yield batch, parts


def pieces(sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]], chunk_len: int) -> Iterator[Piece]:
    """The pieces of one pass, at most `chunk_len` tokens each."""
    begin = 0
    for index, (sequence, ids) in enumerate(zip(sequences, tokens, strict=True)):
        end = begin + len(ids)
        position = sequence.committed_len
        while begin < end:
            step = min(chunk_len - position % chunk_len, end - begin)
            yield Piece(index, begin, begin + step)
            begin, position = begin + step, position + step
