"""Rankings as tables: for each memory who scores most, how sure that is, and what it costs beside the full cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvfold.bench.record import MODES
from kvfold.bench.report.cells import Cell, Scope, estimate, weighted
from kvfold.bench.report.contest import Contest, Entry, contests
from kvfold.bench.report.html import NOTHING, Html, join, table, tag, text
from kvfold.bench.report.look import Look
from kvfold.bench.report.merge import percent
from kvfold.bench.report.words import ASKED, counted, difference_text, named, percent_text, score_text

_HEADINGS = ("", "policy", "score", "against full", "lost", "gained", "bytes")


def rankings(scope: Scope, looks: Mapping[str, Look]) -> Html:
    """A fold for each memory, the middle one open; in it a table for each mode."""
    by_memory: dict[str, list[Contest]] = {}
    for contest in (contest for mode in MODES if mode in scope.samples for contest in contests(scope, mode)):
        by_memory.setdefault(contest.memory, []).append(contest)
    opened = sorted(by_memory, key=percent)[(len(by_memory) - 1) // 2] if by_memory else None
    return join(_fold(memory, memory == opened, found, scope, looks) for memory, found in by_memory.items())


def _fold(memory: str, is_open: bool, found: Sequence[Contest], scope: Scope, looks: Mapping[str, Look]) -> Html:
    summary = tag("summary", text(f"Ranking in {memory} of the bytes"))
    return tag("details", summary, *(_ranking(contest, scope, looks) for contest in found), open=is_open, class_="fold")


def _ranking(contest: Contest, scope: Scope, looks: Mapping[str, Look]) -> Html:
    parts = [tag("h4", text(ASKED[contest.mode]))]
    if contest.entries:
        full = scope.full(contest.mode)
        lines = [_full_line(full, scope, looks)] if full else []
        lines += [_line(place, entry, looks) for place, entry in enumerate(contest.entries, 1)]
        parts += [table(_HEADINGS, lines, words=2), tag("p", text(_told(contest)), class_="note")]
    if contest.left_out:
        reasons = "; ".join(f"{cell.policy} ({reason(cell)})" for cell in contest.left_out)
        parts.append(tag("p", text(f"Not ranked: {reasons}."), class_="note"))
    return tag("div", *parts, class_="ranking")


def _full_line(full: Cell, scope: Scope, looks: Mapping[str, Look]) -> list[Html]:
    score = estimate(weighted(full.scores, scope.common([full])))
    empty = [NOTHING] * 3
    return [NOTHING, named(full.policy, looks), score_text(score), *empty, text(percent_text(full.share))]


def _line(place: int, entry: Entry, looks: Mapping[str, Look]) -> list[Html]:
    first = [text(place), named(entry.cell.policy, looks), score_text(entry.score)]
    beside = entry.beside
    middle = [difference_text(beside.difference), text(beside.lost), text(beside.gained)] if beside else [NOTHING] * 3
    return [*first, *middle, text(percent_text(entry.cell.share))]


def _told(contest: Contest) -> str:
    tied = contest.entries[0].tied
    told = f"; not told apart from the first: {', '.join(tied)}" if tied else ""
    return f"{counted(contest.num_samples, 'sample')}{told}."


def reason(cell: Cell) -> str:
    """Why a cell cannot be compared."""
    told = [f"{note} on {counted(count, 'sample')}" for note, count in cell.failures.items()]
    return ", ".join(told) or f"{counted(len(cell.scores), 'sample')} scored"
