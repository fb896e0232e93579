"""Ranking tables: for each memory budget, scores with intervals, and differences to the full cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvfold.bench.record import MODES
from kvfold.bench.report.cells import Cell, Scope, estimate, weighted
from kvfold.bench.report.comparison import Comparison, Entry, comparisons
from kvfold.bench.report.html import NOTHING, Html, join, table, tag, text
from kvfold.bench.report.merge import percent
from kvfold.bench.report.policy_style import PolicyStyle
from kvfold.bench.report.text import ASKED, counted, difference_text, named, percent_text, score_text

_HEADINGS = ("", "policy", "score", "against full", "lost", "gained", "bytes")


def rankings(scope: Scope, styles: Mapping[str, PolicyStyle]) -> Html:
    """A fold for each memory, the middle one open; in it a table for each mode."""
    by_memory: dict[str, list[Comparison]] = {}
    for comparison in (
        comparison for mode in MODES if mode in scope.samples for comparison in comparisons(scope, mode)
    ):
        by_memory.setdefault(comparison.memory, []).append(comparison)
    opened = sorted(by_memory, key=percent)[(len(by_memory) - 1) // 2] if by_memory else None
    return join(_fold(memory, memory == opened, found, scope, styles) for memory, found in by_memory.items())


def _fold(
    memory: str, is_open: bool, found: Sequence[Comparison], scope: Scope, styles: Mapping[str, PolicyStyle]
) -> Html:
    summary = tag("summary", text(f"Ranking in {memory} of the bytes"))
    return tag(
        "details", summary, *(_ranking(comparison, scope, styles) for comparison in found), open=is_open, class_="fold"
    )


def _ranking(comparison: Comparison, scope: Scope, styles: Mapping[str, PolicyStyle]) -> Html:
    parts = [tag("h4", text(ASKED[comparison.mode]))]
    if comparison.entries:
        full = scope.full(comparison.mode)
        lines = [_full_line(full, scope, styles)] if full else []
        lines += [_line(place, entry, styles) for place, entry in enumerate(comparison.entries, 1)]
        parts += [table(_HEADINGS, lines, words=2), tag("p", text(_told(comparison)), class_="note")]
    if comparison.left_out:
        reasons = "; ".join(f"{cell.policy} ({reason(cell)})" for cell in comparison.left_out)
        parts.append(tag("p", text(f"Not ranked: {reasons}."), class_="note"))
    return tag("div", *parts, class_="ranking")


def _full_line(full: Cell, scope: Scope, styles: Mapping[str, PolicyStyle]) -> list[Html]:
    score = estimate(weighted(full.scores, scope.common([full])))
    empty = [NOTHING] * 3
    return [NOTHING, named(full.policy, styles), score_text(score), *empty, text(percent_text(full.share))]


def _line(place: int, entry: Entry, styles: Mapping[str, PolicyStyle]) -> list[Html]:
    first = [text(place), named(entry.cell.policy, styles), score_text(entry.score)]
    beside = entry.beside
    middle = [difference_text(beside.difference), text(beside.lost), text(beside.gained)] if beside else [NOTHING] * 3
    return [*first, *middle, text(percent_text(entry.cell.share))]


def _told(comparison: Comparison) -> str:
    tied = comparison.entries[0].tied
    told = f"; not told apart from the first: {', '.join(tied)}" if tied else ""
    return f"{counted(comparison.num_samples, 'sample')}{told}."


def reason(cell: Cell) -> str:
    """Why a cell cannot be compared."""
    told = [f"{note} on {counted(count, 'sample')}" for note, count in cell.failures.items()]
    return ", ".join(told) or f"{counted(len(cell.scores), 'sample')} scored"
