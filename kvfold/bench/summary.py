"""Summary table of a run: by task, length and mode, every policy at every budget against the full cache.

Scores are in percent with a 95 % bootstrap interval; differences to the full cache are paired, sample by sample. Both
follow `kvfold.bench.statistics`; of a single sample there is no interval.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from kvfold.bench.record import OWN, Mode, Row
from kvfold.bench.size_cache import FULL, share_of
from kvfold.bench.statistics import Estimate, mean_interval, paired_difference

_OVER = 1.01  # times its memory that a row may take unmentioned


@dataclass(frozen=True)
class SummaryRow:
    """One policy in one memory, over all samples of a task; `score` is None where it could not run."""

    workload: str
    task: str
    length: int
    mode: Mode
    policy: str
    memory: str
    num_samples: int
    score: Estimate | None  # from 0 to 1
    difference: Estimate | None  # to the full cache, of the samples that both have
    bytes_percent: float
    sent_percent: float  # tokens sent of those of the original prompt
    decode_ms: float | None
    kl: float | None
    note: str


def lines(rows: Iterable[Row]) -> list[SummaryRow]:
    """One line per (task, length, mode, policy, memory), in the order of their first rows."""
    groups: dict[tuple[str, str, int, Mode, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.task, row.length, row.mode, row.policy, row.memory), []).append(row)
    full = {key[:4]: members for key, members in groups.items() if key[4] == FULL}
    return [_line(members, full.get(key[:4], [])) for key, members in groups.items()]


def _line(rows: Sequence[Row], full: Sequence[Row]) -> SummaryRow:
    ran = [row for row in rows if row.score is not None]
    first = rows[0]
    return SummaryRow(
        first.workload,
        first.task,
        first.length,
        first.mode,
        first.policy,
        first.memory,
        len(ran),
        _interval([row.score for row in ran if row.score is not None]),
        None if first.policy == FULL else _difference(ran, full),
        fmean([100 * row.resident_bytes / row.full_bytes for row in ran]) if ran else 0.0,
        100 * fmean([row.sent_share for row in rows]),
        _middle([row.decode_ms for row in ran]),
        _middle([row.kl for row in ran]),
        next((row.note for row in rows if row.note), ""),
    )


def _difference(ran: Sequence[Row], full: Sequence[Row]) -> Estimate | None:
    baseline = {row.index: row.score for row in full if row.score is not None}
    pairs = [(row.score, baseline[row.index]) for row in ran if row.score is not None and row.index in baseline]
    if len(pairs) < 2:
        return None
    scores, others = zip(*pairs, strict=True)
    return paired_difference(scores, others)


def _interval(scores: list[float]) -> Estimate | None:
    if len(scores) == 1:
        return Estimate(scores[0], scores[0], scores[0], 1)
    return mean_interval(scores) if scores else None


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def above_memory(rows: Iterable[Row]) -> list[Row]:
    """Rows above their memory budget by more than 1 %: the size was searched on another sample."""
    matched = (row for row in rows if row.score is not None and row.policy != FULL and row.memory != OWN)
    return [row for row in matched if row.resident_bytes > _OVER * share_of(row.memory) * row.full_bytes]


def score_text(line: SummaryRow) -> str:
    """75 [50, 100]"""
    if line.score is None:
        return line.note or "-"
    mean, low, high = (100 * value for value in (line.score.mean, line.score.low, line.score.high))
    interval = f" [{low:.0f}, {high:.0f}]" if line.num_samples > 1 else ""
    return f"{mean:.0f}{interval}" + (f" ({line.note})" if line.note else "")


def difference_text(line: SummaryRow) -> str:
    """-25 [-50, 0]; with a star where the interval excludes zero, unless all samples are alike"""
    if line.difference is None:
        return ""
    mean, low, high = (100 * value for value in (line.difference.mean, line.difference.low, line.difference.high))
    is_significant = line.difference.excludes_zero and low < high
    return f"{mean:+.0f} [{low:+.0f}, {high:+.0f}]" + ("*" if is_significant else "")
