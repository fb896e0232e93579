"""Decode (dequantise) the slots of one layer's pages run by run; cross-layer codecs get the layer below here.

A `CrossLayerCodec` is given the same slots of the layer below as decoded, in the model's own basis and fp32. Both
layers hold the same slots in the same order, since such a codec is refused where anything is evicted; runs and page
sizes may differ, so slots are matched by their place in the head's row. The layer below may need its own: each layer of
a chain decodes all those under it, so `layers=1::2` reads least.

Low-rank codecs (codec/basis.py) rebuild a head from the latents of its whole group, of which its own pages hold a
share. Heads of a group hold the same slots in the same order; their extents usually lie in one run at the same places,
and where memory was scattered the others' shares are fetched by their place in the row.

    N flat slots of a run, used or not   n slots of a head or an extent   D head dim
    w latents in a head's page   r those of its group
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.codec.base import SIDES, CrossLayerCodec, Side
from kvfold.pages.extent import Run
from kvfold.pages.layer import LayerPages


def decode_run(pages: LayerPages, run: Run, side: Side, dtype: torch.dtype) -> Tensor:
    """All slots of a run [N, D]; keys in the codec's basis. A view where the codec stores `dtype` itself."""
    codec = pages.page_class.codec(side)
    if side in pages.bases:
        return _rebuilt_run(pages, run, side).to(dtype)
    if isinstance(codec, CrossLayerCodec):
        return codec.decode(side, run.sides[side], dtype, _below_run(pages, run, side))
    return codec.decode(side, run.sides[side], dtype)


def restored_run(pages: LayerPages, run: Run, side: Side, dtype: torch.dtype) -> Tensor:
    """All slots of a run [N, D] in the model's own basis."""
    x_ND = decode_run(pages, run, side, dtype)
    row_N = torch.repeat_interleave(torch.tensor(run.heads), torch.tensor(run.capacities)).to(x_ND.device)
    return pages.page_class.codec(side).restore(side, x_ND, pages.state.get(side, {}), row_N)


def latest_below(pages: LayerPages, counts: Sequence[int]) -> dict[Side, Tensor]:
    """What the codecs of a layer that is about to be written need of the layer below, which was written before it: its
    last counts[head] slots, head after head, which are of these positions."""
    found: dict[Side, Tensor] = {}
    for side in SIDES:
        if pages.page_class.codec(side).needs_below and pages.below is not None:
            rows = _restored_rows(pages.below, side)
            found[side] = torch.cat([x_nD[len(x_nD) - count :] for x_nD, count in zip(rows, counts, strict=True)])
    return found


def _below_run(pages: LayerPages, run: Run, side: Side) -> Tensor | None:
    """The slots of the layer below in the places of a run's slots; 0 where the run has none."""
    if pages.below is None:
        return None
    rows = _restored_rows(pages.below, side)
    below_ND = rows[0].new_zeros(sum(run.capacities), rows[0].shape[1])
    for head, extent, start in zip(run.heads, run.extents, run.starts, strict=True):
        first = pages.place(head, extent)
        below_ND[start : start + extent.length] = rows[head][first : first + extent.length]
    return below_ND


def _restored_rows(pages: LayerPages, side: Side) -> list[Tensor]:
    """Every head's slots [n, D] in the model's own basis, fp32, oldest first."""
    return _rows(pages, partial(restored_run, pages, side=side, dtype=torch.float32))


def _rows(pages: LayerPages, decode: Callable[[Run], Tensor]) -> list[Tensor]:
    """Every head's slots, oldest first, of runs that are decoded so."""
    heads: list[list[Tensor]] = [[] for _ in range(pages.num_heads)]
    for run in pages.runs():
        x_ND = decode(run)
        for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
            heads[head].append(x_ND[start : start + length])
    empty_D = torch.empty(0, pages.page_class.head_dim)
    return [torch.cat(parts) if parts else empty_D for parts in heads]


def _rebuilt_run(pages: LayerPages, run: Run, side: Side) -> Tensor:
    """All slots of a run [N, D] from latents, in the model's own basis, fp32."""
    basis = pages.bases[side]
    heads = zip(run.heads, _latents(pages, run, side), strict=True)
    x_ND = torch.cat([basis.slots(head, latent_nr) for head, latent_nr in heads])
    return basis.rotated(x_ND, run.position_N, run.end_position)


def _latents(pages: LayerPages, run: Run, side: Side) -> Iterator[Tensor]:
    """Of each extent of the run, the latents [n, r] of its group."""
    size, shares = pages.bases[side].num_heads, _shares(pages, side, run).split(run.capacities)
    if size == 1:
        yield from shares
    elif _is_aligned(pages, run, size):
        for first in range(0, len(shares), size):
            yield from [torch.cat(shares[first : first + size], -1)] * size
    else:
        rows = _rows(pages, partial(_shares, pages, side))
        for head, extent in zip(run.heads, run.extents, strict=True):
            place, first = pages.place(head, extent), head - head % size
            group = [row_nw[place : place + extent.length] for row_nw in rows[first : first + size]]
            yield functional.pad(torch.cat(group, -1), (0, 0, 0, extent.capacity - extent.length))


def _shares(pages: LayerPages, side: Side, run: Run) -> Tensor:
    """What the pages of a run hold [N, w]."""
    return pages.page_class.codec(side).decode(side, run.sides[side], torch.float32)


def _is_aligned(pages: LayerPages, run: Run, size: int) -> bool:
    """Whether the run has whole groups, and the same slots of all their heads."""
    whole = run.is_uniform and run.heads[0] % size == 0 and len(run.heads) % size == 0
    return whole and len({pages.place(head, extent) for head, extent in zip(run.heads, run.extents, strict=True)}) == 1
