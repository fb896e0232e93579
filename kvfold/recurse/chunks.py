"""Chunks of a text: as few as fit a number of tokens, of about equal length, cut between sentences or paragraphs.

| chunk 0: sentences | chunk 1: sentences … | chunk 2 |        without gaps, in the order of the text
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from kvfold.errors import InputError
from kvfold.shortening.parts import ends_paragraph, parts_of
from kvfold.shortening.tokens import TokenOffsets

_PARAGRAPH = 0.25  # of a chunk: how far before the last sentence that fits a paragraph's end is preferred


class Chunk(NamedTuple):
    """Characters `start` to `end` of a text, and how many tokens begin in them."""

    start: int
    end: int
    num_tokens: int


def num_calls(num_tokens: int, chunk_tokens: int) -> int:
    """The fewest chunks of at most `chunk_tokens` that so many tokens need."""
    return -(-num_tokens // chunk_tokens)


def chunk_text(text: str, chunk_tokens: int, tokenizer: Any = None) -> list[Chunk]:
    """Chunks of at most `chunk_tokens` tokens that cover the text; a sentence longer than that is cut inside."""
    if chunk_tokens < 1:
        raise InputError(f"a chunk of {chunk_tokens} tokens holds nothing; give at least 1")
    tokens = TokenOffsets.of(text, tokenizer)
    bounds, paragraphs = _bounds(text, tokens, chunk_tokens)
    count = np.searchsorted(tokens.starts, bounds)  # tokens before each bound
    cuts = [0]
    while cuts[-1] < len(bounds) - 1:
        cuts.append(_next_cut(count, paragraphs, cuts[-1], chunk_tokens))
    return [Chunk(bounds[low], bounds[high], int(count[high] - count[low])) for low, high in pairwise(cuts)]


def _next_cut(count: Any, paragraphs: Sequence[bool], low: int, most: int) -> int:
    """The bound that ends the chunk from `low` on: what is left is shared evenly among as many chunks as it needs."""
    left = int(count[-1] - count[low])
    fits = int(np.searchsorted(count, count[low] + most, side="right")) - 1
    aim = count[low] + -(-left // max(1, num_calls(left, most)))
    near = max(low + 1, min(fits, int(np.searchsorted(count, aim))))
    if near == len(count) - 1:
        return near
    behind = [at for at in range(near, low, -1) if paragraphs[at] and count[at] >= aim - _PARAGRAPH * most]
    needs_more = behind and num_calls(int(count[-1] - count[behind[0]]), most) > num_calls(left, most) - 1
    return behind[0] if behind and not needs_more else near


def _bounds(text: str, tokens: TokenOffsets, most: int) -> tuple[list[int], list[bool]]:
    """Where a chunk may end, from 0 to the end of the text, and whether a paragraph ends there."""
    bounds, paragraphs = [0], [True]
    for part in parts_of(text) or ():
        low, high = np.searchsorted(tokens.starts, (part.start, part.end))
        inner = tokens.starts[low + most : high : most].tolist()  # of a part longer than a chunk
        bounds += [*inner, part.end]
        paragraphs += [*([False] * len(inner)), ends_paragraph(text, part)]
    if bounds[-1] != len(text):
        bounds.append(len(text))
        paragraphs.append(True)
    return bounds, paragraphs
