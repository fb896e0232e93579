"""Tables of the report as plain data, which the template sets: winners, rankings, depths, costs, fidelity, failures.

Bytes are means over samples, so that rows of equal bytes show them exactly; times are medians, which one slow step does
not move. Lengths and devices stand apart: neither bytes nor times may be mixed over them.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, product

from markupsafe import Markup

from kvfold.bench.record import MODES, Diagnostic, Mode, Row
from kvfold.bench.report.cells import Cell, Comparison, Entry, Scope, comparisons, estimate, weighted
from kvfold.bench.report.markup import (
    Styles,
    bytes_text,
    counted,
    difference_text,
    listed,
    named,
    percent_text,
    score_text,
    tag,
    tokens_text,
)
from kvfold.bench.report.merge import FULL, Section, percent

NUM_BANDS = 10  # of depth
_MOST_NAMED = 2  # policies in a cell
_MISSING = "–"
_TIMES = ("prefill_s", "first_token_s", "decode_ms")


@dataclass(frozen=True)
class Table:
    """The first `words` columns are words, set to the left, and the others numbers."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    kind: str | None = None


def winners(overall: Scope, styles: Styles) -> Table:
    """The best policy in each memory, question known and unknown."""
    found = [comparison for mode in MODES if mode in overall.samples for comparison in comparisons(overall, mode)]
    found.sort(key=lambda comparison: -percent(comparison.memory))
    headings = ("memory", "question", "best policy", "score", "against full", "no significant difference to")
    rows = [_winner(comparison, styles) for comparison in found if comparison.entries]
    return Table(headings, rows, 3, "winners")


def _winner(comparison: Comparison, styles: Styles) -> list[str]:
    best = comparison.entries[0]
    difference = difference_text(best.beside.difference) if best.beside else _MISSING
    more = [f"{len(best.tied) - _MOST_NAMED} more"] if len(best.tied) > _MOST_NAMED else []
    tied = listed([*best.tied[:_MOST_NAMED], *more]) or _MISSING
    name = named(best.cell.policy, styles)
    return [comparison.memory, comparison.mode, name, score_text(best.score), difference, tied]


@dataclass(frozen=True)
class Ranking:
    """All policies in one memory and mode, with what a reader must know about them."""

    mode: Mode
    table: Table | None
    notes: Sequence[str]


def rankings(scope: Scope, styles: Styles) -> dict[str, list[Ranking]]:
    """By memory, largest first; for each mode one."""
    by_memory: dict[str, list[Ranking]] = {}
    for mode in MODES:
        for comparison in comparisons(scope, mode) if mode in scope.samples else ():
            by_memory.setdefault(comparison.memory, []).append(_ranking(comparison, scope, styles))
    return by_memory


def _ranking(comparison: Comparison, scope: Scope, styles: Styles) -> Ranking:
    table, notes = None, []
    if comparison.entries:
        full = scope.full(comparison.mode)
        sent = ("tokens sent",) if any(entry.cell.sent_share < 1 for entry in comparison.entries) else ()
        rows = [_full_row(full, scope, styles, bool(sent))] if full else []
        rows += [_row(entry, styles, bool(sent)) for entry in comparison.entries]
        table = Table(("", "policy", "score", "against full", "lost", "gained", *sent, "bytes"), rows, 2)
        tied = ", ".join(comparison.entries[0].tied)
        told = f"; no significant difference to the first: {tied}" if tied else ""
        notes.append(f"{counted(comparison.num_samples, 'sample')}{told}.")
    if comparison.left_out:
        notes.append(f"Not ranked: {'; '.join(f'{cell.policy} ({reason(cell)})' for cell in comparison.left_out)}.")
    return Ranking(comparison.mode, table, notes)


def _full_row(full: Cell, scope: Scope, styles: Styles, with_sent: bool) -> list[str]:
    score = estimate(weighted(full.scores, scope.common([full])))
    return ["", named(full.policy, styles), score_text(score), "", "", "", *_shares(full, with_sent)]


def _shares(cell: Cell, with_sent: bool) -> list[str]:
    """Of tokens, where some policy sends fewer, and of bytes."""
    return [*([percent_text(cell.sent_share)] if with_sent else []), percent_text(cell.share)]


def _row(entry: Entry, styles: Styles, with_sent: bool) -> list[str]:
    beside = entry.beside
    middle = [difference_text(beside.difference), str(beside.lost), str(beside.gained)] if beside else [""] * 3
    name, score = named(entry.cell.policy, styles), score_text(entry.score)
    return [str(entry.place), name, score, *middle, *_shares(entry.cell, with_sent)]


def reason(cell: Cell) -> str:
    """Why a cell cannot be compared."""
    told = [f"{note} on {counted(count, 'sample')}" for note, count in cell.failures.items()]
    return ", ".join(told) or f"{counted(len(cell.scores), 'sample')} scored"


def depth_of(row: Row) -> float | None:
    """The depth of what is asked for, where a sample has one: from 0, the start of the context, to 1."""
    depth = row.facts.get("depth")
    if row.score is None or not isinstance(depth, (int, float)) or not 0 <= depth <= 1:
        return None
    return float(depth)


@dataclass(frozen=True)
class HeatMap:
    """Needle in a haystack (Kamradt 2023): mean scores by depth, for each policy a column of each length."""

    mode: Mode
    policies: Sequence[Markup]
    lengths: Sequence[str]
    rows: Sequence[Sequence[float | None]]  # by band of depth


def heat_maps(section: Section, styles: Styles) -> dict[str, list[HeatMap]]:
    """By memory, largest first, each beside the full cache; empty where no sample has a depth."""
    rows = [row for row in section.rows if depth_of(row) is not None]
    found: dict[str, list[HeatMap]] = {}
    for memory, mode in product(section.memories, MODES):
        if of_mode := _those(rows, memory, mode):
            full = [row for row in rows if row.policy == FULL and row.mode == mode and row.memory != memory]
            found.setdefault(memory, []).append(heat_map(full + of_mode, mode, styles))
    return found


def _those(rows: Iterable[Row], memory: str, mode: Mode) -> list[Row]:
    return [row for row in rows if (row.memory, row.mode) == (memory, mode)]


def heat_map(rows: Sequence[Row], mode: Mode, styles: Styles) -> HeatMap:
    """Of rows that have a depth."""
    scores: dict[tuple[int, str, int], list[float]] = {}
    for row in rows:
        depth = depth_of(row)
        assert depth is not None and row.score is not None
        scores.setdefault((min(int(depth * NUM_BANDS), NUM_BANDS - 1), row.policy, row.length), []).append(row.score)
    policies = [policy for policy in styles if any(row.policy == policy for row in rows)]
    lengths = sorted({row.length for row in rows})
    means = {place: statistics.fmean(found) for place, found in scores.items()}
    columns = list(product(policies, lengths))
    return HeatMap(
        mode,
        [named(policy, styles) for policy in policies],
        [tokens_text(length) for length in lengths],
        [[means.get((band, policy, length)) for policy, length in columns] for band in range(NUM_BANDS)],
    )


@dataclass(frozen=True)
class Cost:
    """The rows of one policy, memory, mode, length and device that ran."""

    policy: str
    memory: str
    mode: Mode
    length: int
    device: str
    rows: tuple[Row, ...]

    def mean_bytes(self, name: str) -> float:
        """Of resident_bytes, full_bytes or bytes_per_step."""
        return statistics.fmean(getattr(row, name) for row in self.rows)

    def median(self, name: str) -> float | None:
        """Of prefill_s, first_token_s or decode_ms; None where none was measured."""
        values = [value for row in self.rows if (value := getattr(row, name)) is not None]
        return statistics.median(values) if values else None


def costs_of(section: Section) -> list[Cost]:
    """In the order of policies, memories, modes, lengths, devices."""
    groups: dict[tuple[str, str, Mode, int, str], list[Row]] = {}
    for row in section.rows:
        if row.score is not None:
            key = (row.policy, row.memory, row.mode, row.length, section.devices[row.key])
            groups.setdefault(key, []).append(row)
    lengths = sorted({row.length for row in section.rows})
    devices = list(dict.fromkeys(run.device for run in section.runs))
    order = product(section.policies, section.memories, MODES, lengths, devices)
    return [Cost(*key, tuple(groups[key])) for key in order if key in groups]


def cost_table(costs: Sequence[Cost], styles: Styles) -> Table:
    """Of one length; the device is a column where there are several."""
    several = len({cost.device for cost in costs}) > 1
    words = ["policy", "memory", "question", *(["device"] if several else [])]
    numbers = ("resident", "of full", "read per step", "prefill s", "first token s", "decode ms")
    return Table([*words, *numbers], [_cost_row(cost, styles, several) for cost in costs], len(words))


def _cost_row(cost: Cost, styles: Styles, several: bool) -> list[str]:
    resident, full = cost.mean_bytes("resident_bytes"), cost.mean_bytes("full_bytes")
    sizes = [_bytes(resident), percent_text(resident / full), _bytes(cost.mean_bytes("bytes_per_step"))]
    times = [_MISSING if (time := cost.median(name)) is None else f"{time:.3g}" for name in _TIMES]
    words = [cost.memory, cost.mode, *([cost.device] if several else [])]
    return [named(cost.policy, styles), *words, *sizes, *times]


def _bytes(number: float) -> Markup:
    """Rounded for reading; exact in the attribute, and on hovering."""
    exact = f"{number:.2f}".removesuffix(".00")
    return tag("data", bytes_text(number), value=exact, title=f"{exact} bytes")


def fidelity_table(section: Section, styles: Styles) -> Table:
    """Of rows that were compared with the full cache token by token."""
    measured = [row for row in section.rows if row.kl is not None]
    rows = []
    for policy, memory, mode in product(section.policies, section.memories, MODES):
        found = [row for row in _those(measured, memory, mode) if row.policy == policy]
        if found:
            rows.append([named(policy, styles), memory, mode, str(len(found)), *_moved(found)])
    return Table(("policy", "memory", "question", "samples", "KL, nats", "same token", "bits lost per token"), rows, 3)


def _moved(rows: Sequence[Row]) -> tuple[str, str, str]:
    agreements = [row.agreement for row in rows if row.agreement is not None]
    lost = [row.bits_lost for row in rows if row.bits_lost is not None]
    return (
        f"{statistics.fmean(row.kl for row in rows if row.kl is not None):.4f}",
        percent_text(statistics.fmean(agreements)) if agreements else _MISSING,
        f"{statistics.fmean(lost):+.3f}" if lost else _MISSING,
    )


def scorer_table(section: Section, styles: Styles) -> Table:
    """Of caches whose kept slots were compared with the attention of later tokens."""
    headings = ("policy", "memory", "question", "samples", "hit rate", "by chance", "attention kept", "layers agree")
    rows = []
    for policy, memory, mode in product(styles, section.memories, MODES):
        found = [d for d in section.diagnostics if (d.policy, d.memory, d.mode) == (policy, memory, mode) and d.layers]
        if found:
            rows.append([named(policy, styles), memory, mode, str(len(found)), *_kept(found)])
    return Table(headings, rows, 3)


def _kept(found: Sequence[Diagnostic]) -> list[str]:
    names = ("hit_rate", "share_kept", "mass_kept")
    shares = [statistics.fmean(chain.from_iterable(getattr(d, name) for d in found)) for name in names]
    # Pairs of different layers: what stands right of the diagonal.
    pairs = [value for d in found for place, line in enumerate(d.overlap) for value in line[place + 1 :]]
    return [*map(percent_text, shares), f"{statistics.fmean(pairs):.2f}" if pairs else _MISSING]


def failures(section: Section, styles: Styles) -> Table:
    """Cells without a score, counted by reason."""
    found = Counter(
        (row.policy, row.memory, row.mode, row.workload, row.note or "no score")
        for row in section.rows
        if row.score is None
    )
    rows = [[named(key[0], styles), *key[1:], str(count)] for key, count in found.items()]
    return Table(("policy", "memory", "question", "workload", "why", "samples"), rows, 5)
