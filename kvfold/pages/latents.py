"""Low-rank decoding: slots rebuilt from latents, run by run (codec/basis.py).

A head is rebuilt from the latents of its whole group, of which its own pages hold a share. Heads of a group hold the
same slots in the same order; their extents usually lie in one run at the same places, and where memory was scattered
the others' shares are fetched by their place in the row.

    N flat slots of a run, used or not   n slots of an extent   w latents in a head's page   r those of its group
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.codec.base import Side
from kvfold.pages.extent import Run
from kvfold.pages.layer import LayerPages


def rebuilt_run(pages: LayerPages, run: Run, side: Side) -> Tensor:
    """All slots of a run [N, D] in the model's own basis, fp32."""
    basis = pages.bases[side]
    heads = zip(run.heads, _latents(pages, run, side), strict=True)
    x_ND = torch.cat([basis.slots(head, latent_nr) for head, latent_nr in heads])
    return basis.rotated(x_ND, run.position_N, run.end_position)


def _latents(pages: LayerPages, run: Run, side: Side) -> Iterator[Tensor]:
    """Of each extent of the run, the latents [n, r] of its group."""
    size, shares = pages.bases[side].num_heads, _shares(pages, run, side)
    if size == 1:
        yield from shares
    elif _is_aligned(pages, run, size):
        for first in range(0, len(shares), size):
            yield from [torch.cat(shares[first : first + size], -1)] * size
    else:
        rows = _rows(pages, side)
        for head, extent in zip(run.heads, run.extents, strict=True):
            place, first = pages.place(head, extent), head - head % size
            group = [row_nw[place : place + extent.length] for row_nw in rows[first : first + size]]
            yield functional.pad(torch.cat(group, -1), (0, 0, 0, extent.capacity - extent.length))


def _shares(pages: LayerPages, run: Run, side: Side) -> tuple[Tensor, ...]:
    """What the pages of each extent hold [n, w]."""
    latent_Nw = pages.page_class.codec(side).decode(side, run.side(side), torch.float32)
    return torch.split(latent_Nw, [extent.capacity for extent in run.extents])


def _is_aligned(pages: LayerPages, run: Run, size: int) -> bool:
    """Whether the run has whole groups, and the same slots of all their heads."""
    whole = run.is_uniform and run.heads[0] % size == 0 and len(run.heads) % size == 0
    return whole and len({pages.place(head, extent) for head, extent in zip(run.heads, run.extents, strict=True)}) == 1


def _rows(pages: LayerPages, side: Side) -> list[Tensor]:
    """Every head's share of all its slots, oldest first."""
    heads: list[list[Tensor]] = [[] for _ in range(pages.num_heads)]
    for run in pages.runs():
        for head, length, share_nw in zip(run.heads, run.lens, _shares(pages, run, side), strict=True):
            heads[head].append(share_nw[:length])
    return [torch.cat(parts) for parts in heads]
