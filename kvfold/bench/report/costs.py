"""Bytes and speed: resident bytes, bytes read per step, and times, against the full cache of the same run.

Bytes are means over samples, so that rows of equal bytes show them exactly; times are medians, which one slow step does
not move. Lengths and devices stand apart: neither bytes nor times may be mixed over them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from kvfold.bench.record import MODES, Mode, Row
from kvfold.bench.report.html import Html, join, table, tag, text
from kvfold.bench.report.merge import Section
from kvfold.bench.report.policy_style import PolicyStyle
from kvfold.bench.report.text import bytes_text, named, percent_text

_NUMBERS = ("resident", "of full", "read per step", "prefill s", "first token s", "decode ms")
_MISSING = "–"


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


def costs(section: Section) -> list[Cost]:
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


def cost_table(section: Section, styles: Mapping[str, PolicyStyle]) -> Html:
    """A fold for each length, the longest open; the device is a column where there are several."""
    found = costs(section)
    lengths = sorted({cost.length for cost in found})
    several = len({cost.device for cost in found}) > 1
    by_length = [[cost for cost in found if cost.length == length] for length in lengths]
    return join(_fold(costs_of, costs_of is by_length[-1], styles, several) for costs_of in by_length)


def _fold(found: Sequence[Cost], is_open: bool, styles: Mapping[str, PolicyStyle], several: bool) -> Html:
    headings = ["policy", "memory", "question", *(["device"] if several else []), *_NUMBERS]
    summary = tag("summary", text(f"Prompts of {found[0].length:,} tokens"))
    lines = [_line(cost, styles, several) for cost in found]
    inner = table(headings, lines, words=len(headings) - len(_NUMBERS))
    return tag("details", summary, inner, open=is_open, class_="fold")


def _line(cost: Cost, styles: Mapping[str, PolicyStyle], several: bool) -> Sequence[Html]:
    words = [cost.memory, cost.mode, *([cost.device] if several else [])]
    resident, full = cost.mean_bytes("resident_bytes"), cost.mean_bytes("full_bytes")
    read = cost.mean_bytes("bytes_per_step")
    times = [cost.median(name) for name in ("prefill_s", "first_token_s", "decode_ms")]
    shown = [_MISSING if seconds is None else f"{seconds:.3g}" for seconds in times]
    sizes = [_bytes(resident), text(percent_text(resident / full)), _bytes(read)]
    return [named(cost.policy, styles), *map(text, words), *sizes, *map(text, shown)]


def _bytes(number: float) -> Html:
    """Rounded for reading; exact in the attribute, and on hovering."""
    exact = f"{number:.2f}".removesuffix(".00")
    return tag("data", text(bytes_text(number)), value=exact, title=f"{exact} bytes")
