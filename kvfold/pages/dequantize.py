"""Decode (dequantise) the slots of one layer's pages run by run; cross-layer codecs get the layer below here.

A `CrossLayerCodec` is given the same slots of the layer below as decoded, in the model's own basis and fp32. Both
layers hold the same slots in the same order, since such a codec is refused where anything is evicted; runs and page
sizes may differ, so slots are matched by their place in the head's row. The layer below may need its own: each layer of
a chain decodes all those under it, so `layers=1::2` reads least.

    N flat slots of a run, used or not   n slots of a head   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, CrossLayerCodec, Side
from kvfold.pages.extent import Run
from kvfold.pages.latents import rebuilt_run
from kvfold.pages.layer import LayerPages


def decode_run(pages: LayerPages, run: Run, side: Side, dtype: torch.dtype) -> Tensor:
    """All slots of a run [N, D]; keys in the codec's basis. A view where the codec stores `dtype` itself."""
    codec = pages.page_class.codec(side)
    if side in pages.bases:
        return rebuilt_run(pages, run, side).to(dtype)
    if isinstance(codec, CrossLayerCodec):
        return codec.decode(side, run.side(side), dtype, _below_run(pages, run, side))
    return codec.decode(side, run.side(side), dtype)


def restored_run(pages: LayerPages, run: Run, side: Side, dtype: torch.dtype) -> Tensor:
    """All slots of a run [N, D] in the model's own basis."""
    x_ND = decode_run(pages, run, side, dtype)
    capacities = [extent.capacity for extent in run.extents]
    row_N = torch.repeat_interleave(torch.tensor(run.heads), torch.tensor(capacities)).to(x_ND.device)
    return pages.page_class.codec(side).restore(side, x_ND, pages.state.get(side, {}), row_N)


def latest_below(pages: LayerPages, counts: Sequence[int]) -> dict[Side, Tensor]:
    """What the codecs of a layer that is about to be written need of the layer below, which was written before it."""
    found = {side: _latest_below(pages, side, counts) for side in SIDES}
    return {side: x_ND for side, x_ND in found.items() if x_ND is not None}


def _latest_below(pages: LayerPages, side: Side, counts: Sequence[int]) -> Tensor | None:
    """The last counts[head] slots of the layer below, or what they tell, head after head, if the codec asks for them;
    they are of these positions."""
    if not pages.page_class.codec(side).needs_below or pages.below is None:
        return None
    rows = _rows(pages.below, side)
    latest = [x_nD[len(x_nD) - count :] for x_nD, count in zip(rows, counts, strict=True)]
    return torch.cat(latest)


def _below_run(pages: LayerPages, run: Run, side: Side) -> Tensor | None:
    """The slots of the layer below in the places of a run's slots; 0 where the run has none."""
    if pages.below is None:
        return None
    rows = _rows(pages.below, side)
    below_ND = rows[0].new_zeros(sum(extent.capacity for extent in run.extents), rows[0].shape[1])
    for head, extent, start in zip(run.heads, run.extents, run.starts, strict=True):
        first = pages.place(head, extent)
        below_ND[start : start + extent.length] = rows[head][first : first + extent.length]
    return below_ND


def _rows(pages: LayerPages, side: Side) -> list[Tensor]:
    """Every head's slots [n, D] in the model's own basis, fp32, oldest first."""
    empty_D = torch.empty(0, pages.page_class.head_dim)
    heads: list[list[Tensor]] = [[] for _ in range(pages.num_heads)]
    for run in pages.runs():
        x_ND = restored_run(pages, run, side, torch.float32)
        for head, start, length in zip(run.heads, run.starts, run.lens, strict=True):
            heads[head].append(x_ND[start : start + length])
    return [torch.cat(parts) if parts else empty_D for parts in heads]
