"""Needle-in-a-haystack heat maps of depth against length (Kamradt 2023).

Ten bands of depth, one column for each length. A cell is as opaque as its mean score, and says it in digits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from kvfold.bench.record import MODES, Row
from kvfold.bench.report.cells import Place
from kvfold.bench.report.html import NOTHING, Html, buttons, join, tag, text, view
from kvfold.bench.report.merge import Section
from kvfold.bench.report.policy_style import PolicyStyle
from kvfold.bench.report.text import ASKED, named

NUM_BANDS = 10
_WIDE, _HIGH, _LEFT, _BELOW = 34, 17, 34, 18
_NARROWEST = 150  # of a map: two stand side by side on a phone
_INK_TURNS = 0.8  # opacity from which dark ink on the cell would be hard to read
Map = Mapping[tuple[int, int], list[float]]  # (band, length) to scores


def depth_of(row: Row) -> float | None:
    """The depth of what is asked for, where a sample has one: from 0, the start of the context, to 1."""
    depth = row.facts.get("depth")
    if row.score is None or not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
        return None
    return float(depth)


def heat_of(rows: Iterable[Row]) -> Map:
    """Scores by band of depth and length."""
    found: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        depth = depth_of(row)
        if depth is not None and row.score is not None:
            found.setdefault((min(int(depth * NUM_BANDS), NUM_BANDS - 1), row.length), []).append(row.score)
    return found


def heat_svg(heat: Map, lengths: Sequence[int], title: str) -> Html:
    """Lengths across, depths down; a cell without samples stays empty."""
    places = product(range(NUM_BANDS), enumerate(lengths))
    cells = [_cell(band, column, heat.get((band, length), [])) for band, (column, length) in places]
    below = _HIGH * NUM_BANDS + 13
    columns = [_label(_x(i) + _WIDE / 2, below, _thousands(n), "middle") for i, n in enumerate(lengths)]
    depths = [_label(_LEFT - 5, _HIGH * band + 12, f"{100 * band // NUM_BANDS}%", "end") for band in (0, 5)]
    width, height = _x(len(lengths)), _HIGH * NUM_BANDS + _BELOW
    parts = [tag("title", text(title)), *cells, *columns, *depths]
    return tag("svg", *parts, viewBox=f"0 0 {width} {height}", width=width, height=height, role="img", class_="heat")


def _x(column: int) -> int:
    return _LEFT + _WIDE * column


def _cell(band: int, column: int, scores: Sequence[float]) -> Html:
    left, top = _x(column), _HIGH * band
    box = {"x": left, "y": top, "width": _WIDE - 1, "height": _HIGH - 1}
    if not scores:
        return tag("rect", **box, class_="none")
    mean = statistics.fmean(scores)
    fill = tag("rect", **box, class_="hot", style=f"fill-opacity:{mean:.2f}")
    ink = "on" if mean > _INK_TURNS else "off"
    digits = tag(
        "text", text(f"{100 * mean:.0f}"), x=left + (_WIDE - 1) / 2, y=top + 12, text_anchor="middle", class_=ink
    )
    return join([tag("rect", **box, class_="none"), fill, digits])


def _label(x: float, y: float, content: str, anchor: str) -> Html:
    return tag("text", text(content), x=x, y=y, text_anchor=anchor)


def _thousands(length: int) -> str:
    return f"{length / 1000:.3g}k" if length >= 1000 else str(length)


def heat_maps(section: Section, styles: Mapping[str, PolicyStyle], group: str) -> Html:
    """For each memory the maps of all policies; nothing where no sample has a depth."""
    maps: dict[Place, list[Row]] = {}
    for row in section.rows:
        if depth_of(row) is not None:
            maps.setdefault((row.mode, row.policy, row.memory), []).append(row)
    memories = [memory for memory in section.memories if any(place[2] == memory for place in maps)]
    if not memories:
        return NOTHING
    shown = memories[len(memories) // 2]
    views = [view(group, memory, shown, _maps(maps, memory, styles)) for memory in memories]
    return join([buttons(group, memories, shown), *views])


def _maps(maps: Mapping[Place, Sequence[Row]], memory: str, styles: Mapping[str, PolicyStyle]) -> Html:
    lengths = sorted({row.length for rows in maps.values() for row in rows})
    width = max(_x(len(lengths)), _NARROWEST)
    columns = f"grid-template-columns: repeat(auto-fill, minmax(min(100%, {width}px), 1fr))"
    parts = []
    for mode in MODES:
        made = [
            _figure(policy, heat_svg(heat_of(rows), lengths, f"{policy} in {memory}, question {mode}"), styles)
            for policy in styles
            if (rows := maps.get((mode, policy, memory)))
        ]
        parts += [tag("h4", text(ASKED[mode])), tag("div", *made, class_="maps", style=columns)] if made else []
    return join(parts)


def _figure(policy: str, svg: Html, styles: Mapping[str, PolicyStyle]) -> Html:
    return tag("figure", tag("figcaption", named(policy, styles)), svg)
