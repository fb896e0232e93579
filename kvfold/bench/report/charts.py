"""Figures as SVG: quality against memory, with each policy named at the end of its line, and bars of bytes and times.

x   share of the full cache's bytes, logarithmic, the full cache at the left: each halving is the same step
y   score, 0 to 100
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from markupsafe import Markup

from kvfold.bench.report.cells import Point, front
from kvfold.bench.report.markup import PolicyStyle, Styles, counted, percent_text, shortened, tag

WIDTH, HEIGHT = 660, 390  # the stylesheet cuts the labels off on a phone, where the legend names the lines
LEFT, RIGHT, TOP, BASE = 34, 430, 14, 340
_LABELS, _LABEL_GAP, _LABEL_LENGTH = 458, 15, 27
_MOST_BANDS = 16  # more would hide each other and the lines
_FEWEST_HALVINGS = 2  # even a run at one memory has an axis
_MOST_TICKS = 8
_MARGIN, _MARGIN_WIDTH = 0.05, 14  # halvings that a tick may stand beyond the last point; room beside the points
_BAR_NAMES, _BAR_END, _BAR_WIDTH, _BAR_STEP = 150, 350, 420, 20


class Axis:
    """From a share of bytes to x; powers of two have ticks."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.first = math.log2(min([*shares, 2.0**-_FEWEST_HALVINGS]))
        self.last = math.log2(max([*shares, 1.0]))

    def x(self, share: float) -> float:
        place = (self.last - math.log2(share)) / (self.last - self.first)
        return LEFT + _MARGIN_WIDTH + (RIGHT - LEFT - 2 * _MARGIN_WIDTH) * place

    @property
    def ticks(self) -> list[float]:
        most, least = math.floor(self.last), math.ceil(self.first - _MARGIN)
        return [2.0**power for power in range(most, least - 1, -math.ceil((most - least + 1) / _MOST_TICKS))]


def y(score: float) -> float:
    return BASE - (BASE - TOP) * score


def plot(points: Sequence[Point], axis: Axis, styles: Styles, title: str) -> Markup:
    """Points sorted by policy and share; `title` says to those who cannot see it what it shows.

    Lines of one point are drawn last, on top of the others.
    """
    best = front(points)
    lines = [list(group) for _, group in groupby(points, key=lambda point: point.policy)]
    lines.sort(key=lambda line: -len(line))
    parts = [tag("title", title), _frame(axis), _front(best, axis)]
    parts += [tag("circle", cx=axis.x(p.share), cy=y(p.score.mean), r=8, class_="ring") for p in best]
    parts += _labels(lines, axis, styles)
    parts += [_line(line, axis, styles[line[0].policy], len(lines) <= _MOST_BANDS) for line in lines]
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="plot")


def _frame(axis: Axis) -> Markup:
    rows = [_words(LEFT - 6, y(v / 100) + 4, str(v), "end") for v in range(0, 101, 20)]
    rules = [tag("path", d=f"M{LEFT} {y(v / 100):.1f}H{RIGHT}", class_="rule") for v in range(0, 101, 20)]
    columns = [_words(axis.x(share), BASE + 18, percent_text(share), "middle") for share in axis.ticks]
    marks = [tag("path", d=f"M{axis.x(share):.1f} {BASE}v4", class_="rule") for share in axis.ticks]
    name = _words((LEFT + RIGHT) / 2, HEIGHT - 8, "bytes of the cache, % of full (fewer →)", "middle")
    return Markup("").join([*rows, *rules, *columns, *marks, name])


def _words(x_at: float, y_at: float, content: str, anchor: str) -> Markup:
    return tag("text", content, x=x_at, y=y_at, text_anchor=anchor)


def _line(line: Sequence[Point], axis: Axis, style: PolicyStyle, has_band: bool) -> Markup:
    upper = [f"{axis.x(p.share):.1f} {y(p.score.high):.1f}" for p in line]
    lower = [f"{axis.x(p.share):.1f} {y(p.score.low):.1f}" for p in reversed(line)]
    band = tag("path", d=f"M{'L'.join(upper + lower)}Z", fill=style.colour, class_="band")
    way = "L".join(f"{axis.x(p.share):.1f} {y(p.score.mean):.1f}" for p in line)
    stroke = tag("path", d=f"M{way}", stroke=style.colour, stroke_dasharray=style.dash, class_="line")
    markers = [_whisker(p, axis, style) + _marker(p, axis, style) for p in line]
    return tag("g", *([band] if has_band and len(line) > 1 else []), stroke, *markers, data_policy=style.number)


def _whisker(point: Point, axis: Axis, style: PolicyStyle) -> Markup:
    way = f"M{axis.x(point.share):.1f} {y(point.score.low):.1f}V{y(point.score.high):.1f}"
    return tag("path", d=way, stroke=style.colour, class_="whisker")


def _marker(point: Point, axis: Axis, style: PolicyStyle) -> Markup:
    score = point.score
    means = f"{100 * score.mean:.1f} ({100 * score.low:.1f} to {100 * score.high:.1f})"
    bytes_told = f"{percent_text(point.share)} of the bytes, {counted(score.num_samples, 'sample')}"
    told = tag("title", f"{point.policy} in {point.memory}: {means}, {bytes_told}")
    return style.marker(axis.x(point.share), y(score.mean), told, class_="marker")


def _front(best: Sequence[Point], axis: Axis) -> Markup:
    """A staircase: a score is had from its bytes on."""
    if not best:
        return Markup("")
    x_at, y_at = axis.x(best[0].share), y(best[0].score.mean)
    steps = "".join(f"H{axis.x(p.share):.1f}V{y(p.score.mean):.1f}" for p in best[1:])
    return tag("path", d=f"M{x_at:.1f} {y_at:.1f}{steps}", class_="front")


def _labels(lines: Sequence[Sequence[Point]], axis: Axis, styles: Styles) -> list[Markup]:
    """In the order of the lines' ends; of the best ones where not all have room."""
    room = int((BASE - TOP) / _LABEL_GAP)
    ordered = sorted(lines, key=lambda line: y(line[0].score.mean))[:room]
    places = spread([y(line[0].score.mean) for line in ordered], _LABEL_GAP, TOP, BASE)
    made = [_label(line, at, axis, styles[line[0].policy]) for line, at in zip(ordered, places, strict=True)]
    left = len(lines) - len(ordered)
    return [*made, *([_words(_LABELS + 9, BASE + 18, f"and {left} more", "start")] if left else [])]


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted places, moved apart by at least `gap` within low..high."""
    placed: list[float] = []
    for at in wanted:
        placed.append(max(at, placed[-1] + gap if placed else low))
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], placed[i + 1] - gap if i + 1 < len(placed) else high)
    return placed


def _label(line: Sequence[Point], at: float, axis: Axis, style: PolicyStyle) -> Markup:
    """Marker and name beside the point of fewest bytes; a dotted line leads there."""
    end = line[0]
    way = f"M{axis.x(end.share):.1f} {y(end.score.mean):.1f}H{RIGHT}L{_LABELS - 6} {at:.1f}"
    leader = tag("path", d=way, stroke=style.colour, class_="leader")
    name = tag("title", end.policy)
    shown = shortened(end.policy, _LABEL_LENGTH)
    words = tag("text", name, shown, x=_LABELS + 9, y=at + 4, class_="name")
    return tag("g", leader, style.marker(_LABELS, at), words, data_policy=style.number)


def bars(found: Sequence[tuple[str, float, str]], styles: Styles, title: str) -> Markup:
    """One bar for each (policy, value, value in words)."""
    most = max((value for _, value, _ in found), default=0.0) or 1.0
    parts = [tag("title", title)]
    for row, (policy, value, shown) in enumerate(found):
        top, style = _BAR_STEP * row, styles[policy]
        length = (_BAR_END - _BAR_NAMES) * value / most
        name = _words(_BAR_NAMES - 8, top + 14, shortened(policy, 24), "end")
        bar = tag("rect", x=_BAR_NAMES, y=top + 4, width=length, height=_BAR_STEP - 8, fill=style.colour)
        parts += [name, bar, _words(_BAR_NAMES + length + 6, top + 14, shown, "start")]
    return tag("svg", *parts, viewBox=f"0 0 {_BAR_WIDTH} {_BAR_STEP * len(found)}", role="img", class_="bars")
