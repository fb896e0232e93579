"""Codes end up in their places, however the places lie: meeting, apart, in several spans, in groups of a codec."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec import Codec, Kivi4, Native
from kvfold.pages.arena import Arena, Span
from kvfold.pages.extent import Codes
from kvfold.pages.layout import PageClass
from kvfold.pages.scatter import Place, write

Drawn = list[tuple[int, int, int]]  # span, slots left free before the place, slots of the place


def draw_codes(page_class: PageClass, num_slots: int) -> Codes:
    """Random bytes, as many rows of each field as so many slots have."""
    found = {}
    for item in page_class.fields:
        rows = num_slots * page_class.rows_per_page(item) // page_class.page_size
        raw = torch.randint(0, 120, (rows, item.bytes()), dtype=torch.uint8)
        found[item.name] = raw.view(item.dtype)
    return found


def check(codec: Codec, drawn: Drawn, indexed: bool) -> None:
    page_class = PageClass(codec, codec, 32, torch.float32, page_size=32)
    arena = Arena(1 << 22, superblock_bytes=4096)
    spans = [arena.allocate(page_class, 60, whole=True)[0] for _ in range(2)]
    arena.memory.fill_(0)
    places, ends = [], [0, 0]
    for which, gap, num_slots in drawn:
        begin = ends[which] + gap * page_class.group
        places.append(Place(spans[which], begin, num_slots * page_class.group))
        ends[which] = begin + num_slots * page_class.group
    codes = draw_codes(page_class, sum(place.num_slots for place in places))
    write(page_class, codes, places, indexed=indexed)
    for item in page_class.fields:
        per = page_class.page_size // page_class.rows_per_page(item)
        for span in spans:
            assert_rows(span, item.name, codes[item.name], places, per)


def assert_rows(span: Span, name: str, codes: torch.Tensor, places: list[Place], per: int) -> None:
    """Row by row: what a plain loop writes, and zeros wherever nothing was to be written."""
    expected, source = torch.zeros_like(span.fields[name]), 0
    for place in places:
        for row in range(place.slot // per, (place.slot + place.num_slots) // per):
            if place.span is span:
                expected[row] = codes[source]
            source += 1
    assert torch.equal(span.fields[name], expected)


DRAWS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=8)


@settings(deadline=None)
@given(DRAWS, st.booleans())
def test_single_slots_find_their_places(drawn: Drawn, indexed: bool) -> None:
    check(Native(), drawn, indexed)


@settings(deadline=None)
@given(DRAWS, st.booleans())
def test_groups_that_share_a_row_find_their_places(drawn: Drawn, indexed: bool) -> None:
    check(Kivi4(), drawn, indexed)


def test_nothing_is_written_for_no_places() -> None:
    page_class = PageClass(Native(), Native(), 32, torch.float32)
    write(page_class, draw_codes(page_class, 0), [])
