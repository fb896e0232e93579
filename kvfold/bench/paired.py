"""What one policy loses against another on the same samples of a run; every task counts the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from kvfold.bench.record import MODES, Mode, Recorded, Row
from kvfold.bench.report.cells import weighted
from kvfold.bench.report.merge import FULL, Sample, sample_of
from kvfold.bench.statistics import Estimate, paired_difference
from kvfold.errors import InputError


@dataclass(frozen=True)
class Paired:
    """One policy in one memory beside another; shares are of the full cache's bytes."""

    mode: Mode
    memory: str
    num_samples: int
    score: float
    other_score: float
    difference: Estimate
    held: float
    other_held: float
    read_of_held: float  # bytes that a decode step reads, of those that the policy holds


def compare(recorded: Recorded, policy: str, other: str, memory: str | None = None) -> list[Paired]:
    """One for each mode and memory that both have; `full` stands in all."""
    memories = dict.fromkeys(row.memory for row in recorded.rows if row.policy == policy)
    wanted = [each for each in memories if memory in (None, each)]
    found = [
        paired for mode in MODES for each in wanted for paired in _paired(recorded.rows, policy, other, mode, each)
    ]
    if not found:
        raise InputError(f'no memory of the run has two samples or more of both "{policy}" and "{other}"')
    return found


def _paired(rows: Sequence[Row], policy: str, other: str, mode: Mode, memory: str) -> Iterator[Paired]:
    mine = _scored(rows, policy, mode, memory)
    theirs = _scored(rows, other, mode, "100%" if other == FULL else memory)
    samples = [sample for sample in mine if sample in theirs]
    if len(samples) < 2:
        return

    def over_tasks(rows: Mapping[Sample, Row], value: Callable[[Row], float]) -> list[float]:
        return weighted({sample: value(rows[sample]) for sample in samples}, samples, parts=3)

    scores, others = (over_tasks(each, lambda row: row.score or 0.0) for each in (mine, theirs))
    held, other_held = (
        fmean(over_tasks(each, lambda row: row.resident_bytes / row.full_bytes)) for each in (mine, theirs)
    )
    read = fmean(over_tasks(mine, lambda row: row.bytes_per_step / row.resident_bytes))
    difference = paired_difference(scores, others)
    yield Paired(mode, memory, len(samples), fmean(scores), fmean(others), difference, held, other_held, read)


def _scored(rows: Sequence[Row], policy: str, mode: Mode, memory: str) -> dict[Sample, Row]:
    found = (row for row in rows if (row.policy, row.mode, row.memory) == (policy, mode, memory))
    return {sample_of(row): row for row in found if row.score is not None}


def line(found: Paired) -> str:
    """Scores in percent, their difference with its 95 % interval, the same in percent of the other's, and bytes."""
    mean, low, high = (100 * value for value in (found.difference.mean, found.difference.low, found.difference.high))
    base = max(found.other_score, 1e-9)
    relative = " ".join(f"{value / base:+.2f}%" for value in (mean, low, high))
    scores = f"{100 * found.score:6.2f} against {100 * found.other_score:6.2f}: {mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    costs = f"held {found.held:.1%} against {found.other_held:.1%}, a step reads {found.read_of_held:.1%} of it"
    return f"{found.mode:8} {found.memory:>6} n {found.num_samples:4}  {scores}, relative {relative}; {costs}"
