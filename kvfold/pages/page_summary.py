"""Page summaries of sparse readers (policy/reader.py), such as Quest's channel bounds, stored beside the codes.

They are computed from the keys as a reader will decode them, for every page that slots were written to: sealing,
compaction and loading all write through the same place, so a summary is never older than its page.

    M pages   P slots of a page   D head dim   N flat slots
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from kvfold.pages.arena import Span
from kvfold.pages.extent import Extent
from kvfold.pages.layout import SUMMARY, PageClass

Touched = tuple[Extent, int]  # slots were written from this page of the extent on
_TILE = 2048  # pages decoded at a time


def summarise(page_class: PageClass, touched: Sequence[Touched]) -> None:
    """Write the summaries of pages that have just been written to."""
    by_span: dict[Span, list[Touched]] = defaultdict(list)
    for extent, begin in touched:
        by_span[extent.span].append((extent, begin))
    for span, mine in by_span.items():
        pages = [torch.arange(begin, page_class.pages_for(extent.length)) for extent, begin in mine]
        page_M = torch.cat([extent.first + page for (extent, _), page in zip(mine, pages, strict=True)])
        left_M = torch.cat([
            extent.length - page * page_class.page_size for (extent, _), page in zip(mine, pages, strict=True)
        ])  # fmt: skip
        for page_m, left_m in zip(page_M.split(_TILE), left_M.split(_TILE), strict=True):
            _write(span, page_m.to(span.arena.device), left_m.to(span.arena.device))


def _write(span: Span, page_M: Tensor, left_M: Tensor) -> None:
    """`left_M`: slots in use from the start of each page on, also beyond its end."""
    page_class = span.page_class
    k_MPD = _keys(span, page_M)
    used_MP = torch.arange(page_class.page_size, device=page_M.device) < left_M.unsqueeze(-1)
    rows = page_class.reader.summarise(k_MPD, used_MP)
    for item in page_class.summaries:
        by_page = span.fields[item.name].view(span.num_pages, -1)
        by_page[page_M] = rows[item.name.removeprefix(SUMMARY)].flatten(1).to(item.dtype)


def _keys(span: Span, page_M: Tensor) -> Tensor:
    """Keys of whole pages [M, P, D] in the codec's basis, fp32."""
    page_class = span.page_class
    codes = {}
    for item in page_class.fields:
        if item.name.startswith("k."):
            by_page = span.fields[item.name].view(span.num_pages, -1, item.width)
            codes[item.name[2:]] = by_page[page_M].flatten(0, 1)
    k_ND = page_class.k.decode("k", codes, torch.float32)
    return k_ND.view(len(page_M), page_class.page_size, -1)
