"""Scatter codes into KV pages: few launches, however many heads and fields there are.

Codes lie head after head; their places do too, but for the unused end of each head's last page. Places that meet end to
end take one copy per field (heads of full pages); others one indexed copy per field, or on a CPU, where launches are
cheap and indices are not, one copy each.

Summaries of sparse readers (policy/reader.py), such as Quest's channel bounds, are computed here from the keys as a
reader will decode them, for every page that slots were written to: sealing, compaction and loading all write through
this place, so a summary is never older than its page.

    N rows of a field or flat slots   M pages   P slots of a page   D head dim
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.pages.arena import Span
from kvfold.pages.async_copy import row_numbers, upload
from kvfold.pages.extent import Codes, Extent
from kvfold.pages.layout import SUMMARY, PageClass

Touched = tuple[Extent, int]  # slots were written from this page of the extent on
_TILE = 2048  # pages decoded at a time


class Place(NamedTuple):
    """`num_slots` adjacent slots of a span from `slot` on, both in whole groups of the codec."""

    span: Span
    slot: int
    num_slots: int


def write(page_class: PageClass, codes: Codes, places: Sequence[Place], *, indexed: bool | None = None) -> None:
    """Codes in order to places in order; together they are as long. `indexed` copies: by default, on a GPU."""
    source = 0
    for _, mine in groupby(_joined(places), key=lambda place: id(place.span)):
        here = list(mine)
        on_gpu = here[0].span.arena.device.type == "cuda"
        _write(page_class, codes, source, here, on_gpu if indexed is None else indexed)
        source += sum(place.num_slots for place in here)


def _joined(places: Sequence[Place]) -> Iterator[Place]:
    """Places that meet end to end as one."""
    last: Place | None = None
    for place in places:
        if last is not None and last.span is place.span and last.slot + last.num_slots == place.slot:
            last = last._replace(num_slots=last.num_slots + place.num_slots)
            continue
        if last is not None:
            yield last
        last = place
    if last is not None:
        yield last


def _write(page_class: PageClass, codes: Codes, source: int, places: Sequence[Place], indexed: bool) -> None:
    """One span's share: the codes from slot `source` on."""
    span, num_slots = places[0].span, sum(place.num_slots for place in places)
    rows: dict[int, Tensor] = {}  # slots that share a row of a field -> where the rows go
    for item in page_class.fields:
        per = page_class.page_size // page_class.rows_per_page(item)
        target, new = span.fields[item.name], codes[item.name][source // per : (source + num_slots) // per]
        if len(places) == 1 or not indexed:
            _copy(target, new, places, per)
            continue
        if per not in rows:
            rows[per] = _rows(places, per, target.device)
        target.index_copy_(0, rows[per], new.to(target.dtype))


def _copy(target: Tensor, new: Tensor, places: Sequence[Place], per: int) -> None:
    done = 0
    for place in places:
        count = place.num_slots // per
        target[place.slot // per :][:count] = new[done : done + count]
        done += count


def _rows(places: Sequence[Place], per: int, device: torch.device) -> Tensor:
    """int64 [N]: the row each code goes to, which is its own number and how far its place has moved."""
    counts = [place.num_slots // per for place in places]
    before = [0, *accumulate(counts)]
    moved = upload([place.slot // per - start for place, start in zip(places, before, strict=False)], device)
    return torch.arange(before[-1], device=device) + moved[row_numbers(counts, device)]


def summarise(page_class: PageClass, touched: Sequence[Touched]) -> None:
    """Write the summaries of pages that have just been written to."""
    by_span: dict[Span, list[Touched]] = defaultdict(list)
    for extent, begin in touched:
        by_span[extent.span].append((extent, begin))
    for span, mine in by_span.items():
        pages = [(extent, torch.arange(begin, page_class.pages_for(extent.length))) for extent, begin in mine]
        page_M = torch.cat([extent.first + page for extent, page in pages])
        left_M = torch.cat([extent.length - page * page_class.page_size for extent, page in pages])
        for page_m, left_m in zip(page_M.split(_TILE), left_M.split(_TILE), strict=True):
            _write_summaries(span, page_m.to(span.arena.device), left_m.to(span.arena.device))


def _write_summaries(span: Span, page_M: Tensor, left_M: Tensor) -> None:
    """`left_M`: slots in use from the start of each page on, also beyond its end."""
    page_class, codes = span.page_class, {}
    for item in page_class.fields:
        if item.name.startswith("k."):
            by_page = span.fields[item.name].view(span.num_pages, -1, item.width)
            codes[item.name[2:]] = by_page[page_M].flatten(0, 1)
    k_ND = page_class.k.decode("k", codes, torch.float32)  # in the codec's basis
    used_MP = torch.arange(page_class.page_size, device=page_M.device) < left_M.unsqueeze(-1)
    rows = page_class.reader.summarise(k_ND.view(*used_MP.shape, -1), used_MP)
    for item in page_class.summaries:
        by_page = span.fields[item.name].view(span.num_pages, -1)
        by_page[page_M] = rows[item.name.removeprefix(SUMMARY)].flatten(1).to(item.dtype)
