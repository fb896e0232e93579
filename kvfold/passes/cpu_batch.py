"""Batched decode attention on a CPU: one token for each of many sequences, rows of like length in one call.

Attention to a few hundred slots takes less time than calling it, and calling it apart for pages and open block twice
as long. So slots that are stored as floats are copied side by side, in fp32, as which a CPU reads them anyhow. Their
order does not matter, so the open block stands in front and heads may differ in what follows:

    row, head:  | open block | stored slots | masked |

    B rows of a call   N rows of the step   H KV heads   G query heads per KV head   S slots   D head dim
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.attend.lse_merge import attend
from kvfold.core import LayerSpec
from kvfold.pages.sequence import SequenceCache

_CALL_BYTES = 4 << 20  # of the copies that a call reads: what a core's cache holds, and a few
_MOST_COPIED = 1 << 20  # of slots that could be read where they are


class RowPart(NamedTuple):
    """Stored slots of some heads: those of theirs before these, keys and values [h, S, D] as they are stored."""

    heads: slice
    first: int
    k_hSD: Tensor
    v_hSD: Tensor


class Row(NamedTuple):
    """What a new token reads of one layer of its sequence, beside the open block."""

    parts: tuple[RowPart, ...]
    lens: tuple[int, ...]  # stored slots of each head

    @property
    def shape(self) -> tuple[tuple[int, int, int], ...]:
        """Rows of one shape are copied to the same places."""
        return tuple((part.heads.start, part.first, part.k_hSD.shape[1]) for part in self.parts)


def row_of(sequence: SequenceCache, layer: int) -> Row | None:
    """None where attention needs more than floats, or copying them would take longer than a call."""
    spec, window = sequence.spec.layers[layer], sequence.spec.layers[layer].sliding_window
    if sequence.policy.position.shifts or sequence.offloaded is not None:
        return None
    if window is not None and sequence.logical_len >= window:
        return None
    lens, parts = [0] * spec.num_kv_heads, []
    for segment in (*sequence.segments, sequence.tail):
        pages = segment.layers[layer]
        if not pages.page_class.is_plain:
            return None
        for run in pages.runs():
            for heads, k_hSD, v_hSD in run.floats:
                if k_hSD.dtype == torch.float32 and k_hSD.nbytes > _MOST_COPIED:
                    return None
                for mine in _alike(heads, lens):
                    own = slice(mine.start - heads.start, mine.stop - heads.start)
                    parts.append(RowPart(mine, lens[mine.start], k_hSD[own], v_hSD[own]))
                    lens[mine] = [lens[mine.start] + k_hSD.shape[1]] * (mine.stop - mine.start)
    return Row(tuple(parts), tuple(lens))


def _alike(heads: slice, lens: Sequence[int]) -> Iterator[slice]:
    """Neighbours that have as many slots so far, so that what follows goes to the same places."""
    for _, group in groupby(range(heads.start, heads.stop), lens.__getitem__):
        first, *more = group
        yield slice(first, first + 1 + len(more))


@dataclass
class Call:
    """Rows that are read together, and room for their slots."""

    rows: list[int]  # of the step
    index_B: Tensor  # the same
    k_BHSD: Tensor
    v_BHSD: Tensor
    bias_BHS: Tensor | None  # -inf where a head has no slot
    places: list[Tensor]  # views: of each row its open block, then its parts, the keys before the values

    @classmethod
    def over(cls, rows: Mapping[int, Row], num_open: Mapping[int, int], spec: LayerSpec) -> Call:
        """Room for these rows, by their number in the step."""
        len_BH = torch.tensor([[num_open[index] + length for length in row.lens] for index, row in rows.items()])
        num_slots = int(len_BH.max())
        is_padded = bool((len_BH < num_slots).any())
        shape = (2, len(rows), spec.num_kv_heads, num_slots, spec.head_dim)
        k_BHSD, v_BHSD = torch.zeros(shape) if is_padded else torch.empty(shape)
        bias_BHS = None
        if is_padded:
            bias_BHS = torch.zeros(shape[1:4]).masked_fill_(torch.arange(num_slots) >= len_BH.unsqueeze(-1), -torch.inf)
        places = [
            place
            for at, (index, row) in enumerate(rows.items())
            for place in _places(k_BHSD[at], v_BHSD[at], row, num_open[index])
        ]
        return cls(list(rows), torch.tensor(list(rows)), k_BHSD, v_BHSD, bias_BHS, places)

    def fill(self, slots: list[Tensor]) -> None:
        """`slots`: what goes to each of the places."""
        torch._foreach_copy_(self.places, slots)

    def attend(self, q_BHGD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Output [B, H, G, D] and natural-log-sum-exp [B, H, G]."""
        q_RGD, k_RSD, v_RSD = (x.flatten(0, 1) for x in (q_BHGD, self.k_BHSD, self.v_BHSD))
        bias_RS = None if self.bias_BHS is None else self.bias_BHS.flatten(0, 1)
        out, lse = attend(q_RGD.unsqueeze(2), k_RSD, v_RSD, scale, bias_HS=bias_RS)
        shape = q_BHGD.shape[:2]
        return out.squeeze(2).unflatten(0, shape), lse.squeeze(2).unflatten(0, shape)


def _places(k_HSD: Tensor, v_HSD: Tensor, row: Row, num_open: int) -> Iterator[Tensor]:
    yield k_HSD[:, :num_open]
    yield v_HSD[:, :num_open]
    for part in row.parts:
        begin = num_open + part.first
        mine = slice(begin, begin + part.k_hSD.shape[1])
        yield k_HSD[part.heads, mine]
        yield v_HSD[part.heads, mine]


@dataclass
class CpuBatch:
    """The attention calls of a step. Layers with as many slots share the buffers of a call."""

    sequences: Sequence[SequenceCache]
    _calls: dict[object, list[Call]] = field(default_factory=dict)

    def calls(self, layer: int, rows: Mapping[int, Row]) -> list[Call]:
        """For rows of a layer, by their number in the step; in the order in which `fill` takes their slots."""
        spec = self.sequences[0].spec.layers[layer]
        key = (spec.num_kv_heads, spec.head_dim, *((index, row.shape) for index, row in rows.items()))
        if key not in self._calls:
            num_open = {index: self.sequences[index].open.fill + 1 for index in rows}
            lens = {index: num_open[index] + max(row.lens) for index, row in rows.items()}
            slot_bytes = 8 * spec.num_kv_heads * spec.head_dim
            self._calls[key] = [
                Call.over({index: rows[index] for index in group}, num_open, spec)
                for group in grouped(lens, _CALL_BYTES // slot_bytes)
            ]
        return self._calls[key]


def grouped(lens: Mapping[int, int], most: int) -> list[list[int]]:
    """Rows by falling length, in groups that hold `most` slots with their padding, less than half of which is padding;
    a longer row stands alone."""
    found: list[list[int]] = []
    room = longest = 0
    for index in sorted(lens, key=lambda index: -lens[index]):
        if not found or longest > room or 2 * lens[index] <= longest:
            found.append([])
            longest, room = lens[index], most
        found[-1].append(index)
        room -= longest
    return found
