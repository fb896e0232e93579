"""`late`: passages whose vectors know what stands around them (late chunking, arXiv:2409.04701).

There an encoder reads the whole document and its token vectors are pooled by chunk. Vectors of words and TF-IDF know no
context, so here the vector of every sentence takes a share of those beside it before sentences are pooled: "It was
founded in 1990." comes near to what its neighbours are about.

    n sentences   N units   D dimensions
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold.policy.registry import register
from kvfold.shortening.base import Chunker, Embedder, Task, Unit
from kvfold.shortening.chunkers.passages import passages
from kvfold.shortening.embedders.codes import encode_unit
from kvfold.shortening.tokens import TokenOffsets

_REACH = 4  # sentences on either side
_BLOCK = 2048  # sentences at once


@register(
    "units",
    "late",
    paper="arXiv:2409.04701",
    cost="9·D for each sentence",
    published="differs: no pass of an encoder over the document; vectors of sentences are mixed with their neighbours'",
)
@dataclass(frozen=True)
class Late(Chunker):
    """Passages of about `size` tokens, whose vectors are pooled from sentences that know their neighbours.

    A sentence that is j sentences away adds `share` to the power of j of its vector, up to 4 away.
    """

    size: int = 128
    share: float = 0.5

    def validate(self) -> str | None:
        if self.size < 1:
            return f"size is at least 1 token, not {self.size}"
        return None if 0 <= self.share <= 1 else f"share is from 0 to 1, not {self.share:g}"

    def units(self, text: str, parts: tuple[Unit, ...], embedder: Embedder, tokens: TokenOffsets) -> tuple[Unit, ...]:
        return passages(text, parts, tokens, self.size)

    def codes(self, task: Task) -> NDArray[np.int8]:
        codes_nD = task.embedder.codes([task.text_of(part) for part in task.parts], task.progress)
        first = np.searchsorted([part.start for part in task.parts], [unit.start for unit in task.units])
        return pooled(codes_nD, first, self.share)


def pooled(codes_nD: NDArray[np.int8], first_N: NDArray[np.int64], share: float) -> NDArray[np.int8]:
    """[N, D]: sums of the mixed vectors of sentences, from the first of each unit to that of the next."""
    total_ND = np.zeros((len(first_N), codes_nD.shape[1]))
    unit_n = np.searchsorted(first_N, np.arange(len(codes_nD)), side="right") - 1
    for low in range(0, len(codes_nD), _BLOCK):
        mixed = mix(codes_nD, low, min(low + _BLOCK, len(codes_nD)), share)
        units, starts = np.unique(unit_n[low : low + _BLOCK], return_index=True)
        total_ND[units] += np.add.reduceat(mixed, starts, axis=0)
    return encode_unit(total_ND)


def mix(codes_nD: NDArray[np.int8], low: int, high: int, share: float) -> NDArray[np.float64]:
    """Sentences `low` to `high` with shares of their neighbours."""
    mixed = codes_nD[low:high].astype(np.float64)
    for step in range(1, _REACH + 1):
        for at in (-step, step):
            first, last = max(low, -at), min(high, len(codes_nD) - at)
            if last > first:
                mixed[first - low : last - low] += share**step * codes_nD[first + at : last + at]
    return mixed
