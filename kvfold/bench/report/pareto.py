"""The Pareto front of quality against memory: the points that no other point beats in both at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvfold.bench.record import Mode
from kvfold.bench.report.cells import Cell, Scope, estimate, weighted
from kvfold.bench.statistics import Estimate


@dataclass(frozen=True)
class Point:
    """A cell in the plane of share of bytes and score."""

    policy: str
    memory: str
    share: float
    score: Estimate


def points(scope: Scope, mode: Mode) -> list[Point]:
    """Of cells that take part, by policy and then by share. Equal points, as of a policy that evicts nothing and is
    the same in every memory it fits, are one."""
    found = [_point(scope, cell) for cell in scope.cells if cell.mode == mode and scope.takes_part(cell)]
    unique = {(point.policy, point.share, point.score): point for point in found}
    return sorted(unique.values(), key=lambda point: (point.policy, point.share))


def _point(scope: Scope, cell: Cell) -> Point:
    values = weighted(cell.scores, scope.common([cell]))
    return Point(cell.policy, cell.memory, cell.share, estimate(values))


def front(candidates: Iterable[Point]) -> list[Point]:
    """Fewest bytes first; each further point scores more than all before it."""
    best: list[Point] = []
    for point in sorted(candidates, key=lambda point: (point.share, -point.score.mean)):
        if not best or point.score.mean > best[-1].score.mean:
            best.append(point)
    return best
