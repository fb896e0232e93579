"""Quality against memory as SVG: a line and a 95 % band for each policy, the Pareto front in dashes.

x   share of the full cache's bytes, logarithmic: halving the memory is the same step everywhere
y   score, 0 to 100
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from kvfold.bench.report.html import NOTHING, Html, join, tag, text
from kvfold.bench.report.pareto import Point, front
from kvfold.bench.report.policy_style import PolicyStyle
from kvfold.bench.report.text import counted, percent_text

WIDTH, HEIGHT = 440, 320
LEFT, RIGHT, TOP, BASE = 34, 430, 12, 278
_FEWEST_HALVINGS = 2  # even a run at one memory has an axis
_MOST_LABELS = 8
_MARGIN, _MARGIN_WIDTH = 0.1, 14  # halvings beyond the last tick that have room there, and that room


class Axis:
    """From a share of bytes to x; the axis ends at powers of two, each with a tick."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.first = math.floor(math.log2(min([*shares, 2.0**-_FEWEST_HALVINGS])) + _MARGIN)
        self.last = math.ceil(math.log2(max([*shares, 1.0])) - _MARGIN)

    def x(self, share: float) -> float:
        place = (math.log2(share) - self.first) / (self.last - self.first)
        return LEFT + _MARGIN_WIDTH + (RIGHT - LEFT - 2 * _MARGIN_WIDTH) * place

    @property
    def ticks(self) -> list[float]:
        step = math.ceil((self.last - self.first + 1) / _MOST_LABELS)
        return [2.0**power for power in range(self.last, self.first - 1, -step)]


def y(score: float) -> float:
    return BASE - (BASE - TOP) * score


def plot(points: Sequence[Point], axis: Axis, styles: Mapping[str, PolicyStyle], title: str) -> Html:
    """Points sorted by policy and share; `title` says to those who cannot see it what it shows."""
    best = front(points)
    lines = [list(group) for _, group in groupby(points, key=lambda point: point.policy)]
    parts = [tag("title", text(title)), _frame(axis), _front(best, axis)]
    parts += [_line(line, axis, styles[line[0].policy]) for line in lines]
    parts += [_ring(point, axis) for point in best]
    return tag("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", class_="plot")


def _frame(axis: Axis) -> Html:
    rows = [_label(LEFT - 6, y(v / 100) + 4, str(v), "end") + _rule(y(v / 100)) for v in range(0, 101, 20)]
    columns = [_label(axis.x(share), BASE + 18, percent_text(share), "middle") for share in axis.ticks]
    marks = [tag("path", d=f"M{axis.x(share):.1f} {BASE}v4", class_="rule") for share in axis.ticks]
    name = _label((LEFT + RIGHT) / 2, HEIGHT - 6, "bytes of the cache, % of full", "middle")
    return join([*map(Html, rows), *columns, *marks, name])


def _rule(at: float) -> Html:
    return tag("path", d=f"M{LEFT} {at:.1f}H{RIGHT}", class_="rule")


def _label(x_at: float, y_at: float, content: str, anchor: str) -> Html:
    return tag("text", text(content), x=x_at, y=y_at, text_anchor=anchor)


def _line(line: Sequence[Point], axis: Axis, style: PolicyStyle) -> Html:
    upper = [f"{axis.x(p.share):.1f} {y(p.score.high):.1f}" for p in line]
    lower = [f"{axis.x(p.share):.1f} {y(p.score.low):.1f}" for p in reversed(line)]
    band = tag("path", d=f"M{'L'.join(upper + lower)}Z", fill=style.colour, class_="band")
    way = "L".join(f"{axis.x(p.share):.1f} {y(p.score.mean):.1f}" for p in line)
    stroke = tag("path", d=f"M{way}", stroke=style.colour, stroke_dasharray=style.dash, class_="line")
    markers = [_whisker(p, axis, style) + style.marker(axis.x(p.share), y(p.score.mean), _told(p)) for p in line]
    return tag("g", band if len(line) > 1 else NOTHING, stroke, *map(Html, markers), data_policy=style.number)


def _whisker(point: Point, axis: Axis, style: PolicyStyle) -> Html:
    d = f"M{axis.x(point.share):.1f} {y(point.score.low):.1f}V{y(point.score.high):.1f}"
    return tag("path", d=d, stroke=style.colour, class_="whisker")


def _told(point: Point) -> Html:
    score = point.score
    means = f"{100 * score.mean:.1f} ({100 * score.low:.1f} to {100 * score.high:.1f})"
    bytes_told = f"{percent_text(point.share)} of the bytes, {counted(score.num_samples, 'sample')}"
    return tag("title", text(f"{point.policy} in {point.memory}: {means}, {bytes_told}"))


def _front(best: Sequence[Point], axis: Axis) -> Html:
    """A staircase: a score is had from its bytes on."""
    if not best:
        return NOTHING
    x_at, y_at = axis.x(best[0].share), y(best[0].score.mean)
    steps = "".join(f"H{axis.x(p.share):.1f}V{y(p.score.mean):.1f}" for p in best[1:])
    return tag("path", d=f"M{x_at:.1f} {y_at:.1f}{steps}", class_="front")


def _ring(point: Point, axis: Axis) -> Html:
    return tag("circle", cx=axis.x(point.share), cy=y(point.score.mean), r=8, class_="ring")
