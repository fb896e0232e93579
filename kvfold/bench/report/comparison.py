"""Policies at one memory budget, ranked on the same samples and compared with the full cache.

Differences are paired (`kvfold.bench.statistics`): how hard a sample is cancels out. `lost` counts samples on which the
full cache scored more by half a point or better, `gained` the other way round: a policy can lose ten and gain nine,
which a difference of means does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.bench.record import Mode
from kvfold.bench.report.cells import Cell, Scope, bounded, estimate, weighted
from kvfold.bench.report.merge import FULL, Sample, percent
from kvfold.bench.statistics import Estimate, Rank, ranked

REGRESSION = 0.5  # of a score


@dataclass(frozen=True)
class VersusFull:
    """A cell against the full cache of its mode."""

    difference: Estimate
    lost: int
    gained: int


@dataclass(frozen=True)
class Entry:
    """One line of a ranking; `tied` are the policies that it cannot be told from."""

    cell: Cell
    place: int
    score: Estimate
    tied: tuple[str, ...]
    beside: VersusFull | None


@dataclass(frozen=True)
class Comparison:
    """All policies at one memory, best first; `left_out` are cells that cannot be compared."""

    mode: Mode
    memory: str
    num_samples: int
    entries: tuple[Entry, ...]
    left_out: tuple[Cell, ...]


def comparisons(scope: Scope, mode: Mode) -> list[Comparison]:
    """By memory, largest first; the full cache is what all are compared with and takes no part."""
    cells = [cell for cell in scope.cells if cell.mode == mode and cell.policy != FULL]
    memories = sorted({cell.memory for cell in cells}, key=percent, reverse=True)
    return [_contest(scope, mode, memory, [c for c in cells if c.memory == memory]) for memory in memories]


def _contest(scope: Scope, mode: Mode, memory: str, cells: Sequence[Cell]) -> Comparison:
    running = [cell for cell in cells if scope.takes_part(cell)]
    left_out = tuple(cell for cell in cells if cell not in running)
    samples = scope.common(running) if running else ()
    if not samples:
        return Comparison(mode, memory, 0, (), tuple(cells))
    by_policy = {cell.policy: cell for cell in running}
    found = enumerate(_standings(running, samples), 1)
    entries = tuple(_entry(scope, by_policy[standing.name], place, standing) for place, standing in found)
    return Comparison(mode, memory, len(samples), entries, left_out)


def _standings(cells: Sequence[Cell], samples: Sequence[Sample]) -> Sequence[Rank]:
    values = {cell.policy: weighted(cell.scores, samples) for cell in cells}
    if len(samples) > 1:
        return ranked(values)
    order = sorted(values, key=lambda policy: -values[policy][0])
    return [Rank(p, estimate(values[p]), tuple(other for other in order if other != p)) for p in order]


def _entry(scope: Scope, cell: Cell, place: int, standing: Rank) -> Entry:
    return Entry(cell, place, bounded(standing.estimate), standing.tied, beside(scope, cell))


def beside(scope: Scope, cell: Cell) -> VersusFull | None:
    """On the samples that both have; None where there are none."""
    full = scope.full(cell.mode)
    samples = scope.common([cell, full]) if full else ()
    if not full or not samples:
        return None
    gaps = {sample: cell.scores[sample] - full.scores[sample] for sample in samples}
    lost = sum(gap <= -REGRESSION for gap in gaps.values())
    gained = sum(gap >= REGRESSION for gap in gaps.values())
    return VersusFull(estimate(weighted(gaps, samples), -1.0, 1.0), lost, gained)
