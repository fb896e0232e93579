"""Cells of the report: one policy at one memory budget, question-aware or -agnostic, over the samples of a scope.

A scope is a workload, or all of them; in all of them every workload counts the same, however many samples it has. Means
are compared on the same samples only. The samples of a comparison are those of the full cache (of the cell that has
most, without it). A cell takes part if none of them failed and at most one in ten is missing, as in a run that was
stopped: where a policy ran on the easy prompts alone, its mean says nothing beside the others.

Differences are paired (`kvfold.bench.statistics`): how hard a sample is cancels out. `lost` counts samples on which the
full cache scored more by half a point or better, `gained` the other way round: a policy can lose ten and gain nine,
which a difference of means does not show.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvfold.bench.record import Mode, Row
from kvfold.bench.report.merge import FULL, Sample, percent, sample_of
from kvfold.bench.statistics import Estimate, Rank, mean_interval, ranked

_ENOUGH = 0.9  # of the samples of a comparison
REGRESSION = 0.5  # of a score
Place = tuple[Mode, str, str]  # mode, policy, memory


@dataclass(frozen=True)
class Cell:
    """The rows of one policy at one memory in one mode."""

    mode: Mode
    policy: str
    memory: str
    rows: tuple[Row, ...]

    @cached_property
    def scores(self) -> Mapping[Sample, float]:
        return {sample_of(row): row.score for row in self.rows if row.score is not None}

    @cached_property
    def failures(self) -> Counter[str]:
        """How many samples could not be run, by reason."""
        return Counter(row.note or "no score" for row in self.rows if row.score is None)

    @cached_property
    def share(self) -> float:
        """Resident bytes as a share of the full cache's, mean over samples that ran."""
        return statistics.fmean(row.resident_bytes / row.full_bytes for row in self.rows if row.score is not None)

    @cached_property
    def sent_share(self) -> float:
        """Tokens sent as a share of the original prompt's, mean over samples that ran."""
        return statistics.fmean(row.sent_share for row in self.rows if row.score is not None)


@dataclass(frozen=True)
class Scope:
    """The cells of a workload or of all, and the samples that they are compared on, by mode."""

    name: str
    cells: tuple[Cell, ...]
    samples: Mapping[Mode, tuple[Sample, ...]]

    def full(self, mode: Mode) -> Cell | None:
        found = (cell for cell in self.cells if cell.mode == mode and cell.policy == FULL and cell.scores)
        return next(found, None)

    def takes_part(self, cell: Cell) -> bool:
        if cell.failures or not cell.scores:
            return False
        wanted = self.samples[cell.mode]
        return sum(sample in cell.scores for sample in wanted) >= _ENOUGH * len(wanted)

    def common(self, cells: Iterable[Cell]) -> tuple[Sample, ...]:
        """Samples of the comparison that all the cells have; they are of one mode."""
        listed = list(cells)
        return tuple(s for s in self.samples[listed[0].mode] if all(s in cell.scores for cell in listed))


def scope_of(name: str, rows: Iterable[Row]) -> Scope:
    """Cells in the order of their first rows."""
    places: dict[Place, list[Row]] = {}
    for row in rows:
        places.setdefault((row.mode, row.policy, row.memory), []).append(row)
    cells = tuple(Cell(*place, tuple(found)) for place, found in places.items())
    modes = dict.fromkeys(cell.mode for cell in cells)
    return Scope(name, cells, {mode: _compared(cells, mode) for mode in modes})


def _compared(cells: Sequence[Cell], mode: Mode) -> tuple[Sample, ...]:
    of_mode = [cell for cell in cells if cell.mode == mode]
    chosen = [cell for cell in of_mode if cell.policy == FULL and cell.scores] or of_mode
    return tuple(max(chosen, key=lambda cell: len(cell.scores)).scores)


def weighted(scores: Mapping[Sample, float], samples: Sequence[Sample], parts: int = 1) -> list[float]:
    """Scores in the order of samples, scaled so that their mean is the mean over workloads of means; over whatever the
    first `parts` of a sample tell apart, such as 3: workload, task and length."""
    counts = Counter(sample[:parts] for sample in samples)
    scale = {group: len(samples) / (len(counts) * count) for group, count in counts.items()}
    return [scores[sample] * scale[sample[:parts]] for sample in samples]


def estimate(values: Sequence[float], low: float = 0.0, high: float = 1.0) -> Estimate:
    """Mean and interval within the bounds of what is possible; a single value leaves everything possible."""
    if len(values) < 2:
        return Estimate(values[0], low, high, 1)
    return bounded(mean_interval(values), low, high)


def bounded(found: Estimate, low: float = 0.0, high: float = 1.0) -> Estimate:
    """Weights of workloads let a resample's mean pass what any score can be."""
    return replace(found, low=max(low, found.low), high=min(high, found.high))


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
    entries = []
    for place, rank in enumerate(_standings(running, samples), 1):
        cell = by_policy[rank.name]
        entries.append(Entry(cell, place, bounded(rank.estimate), rank.tied, beside(scope, cell)))
    return Comparison(mode, memory, len(samples), tuple(entries), left_out)


def _standings(cells: Sequence[Cell], samples: Sequence[Sample]) -> Sequence[Rank]:
    values = {cell.policy: weighted(cell.scores, samples) for cell in cells}
    if len(samples) > 1:
        return ranked(values)
    order = sorted(values, key=lambda policy: -values[policy][0])
    return [Rank(p, estimate(values[p]), tuple(other for other in order if other != p)) for p in order]


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
