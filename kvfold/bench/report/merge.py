"""Several run folders as sections of one page: runs that asked the same model the same prompts stand together.

A row that several runs hold must be the same in all, but for how long it took and what ran it: otherwise a page would
show one of two results without saying so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvfold.bench.record import OWN, Diagnostic, Key, PromptRow, Recorded, Row, Run, read_run
from kvfold.errors import InputError

FULL = "full"
Sample = tuple[str, str, int, int]  # workload, task, length, index
_TOKENS = ("prompt_tokens", "sent_tokens", "new_tokens")
_COUNTS = ("length", "index", *_TOKENS, "resident_bytes", "full_bytes", "bytes_per_step")
_BY_LAYER = ("hit_rate", "mass_kept", "share_kept")
_TYPES: Mapping[type, Mapping[str, Any]] = {kind: get_type_hints(kind) for kind in (Run, Row, PromptRow, Diagnostic)}
_MOST_TOLD = 200  # characters of values that may be of any size


@dataclass(frozen=True)
class Section:
    """Runs of one model on one set of prompts."""

    runs: tuple[Run, ...]
    rows: tuple[Row, ...]
    prompts: Mapping[Sample, PromptRow]
    diagnostics: tuple[Diagnostic, ...]
    devices: Mapping[Key, str]

    @property
    def policies(self) -> tuple[str, ...]:
        """The full cache first, then as they were asked for."""
        asked = [policy for run in self.runs for policy in run.policies] + [row.policy for row in self.rows]
        present = {row.policy for row in self.rows}
        return tuple(dict.fromkeys(policy for policy in (FULL, *asked) if policy in present))

    @property
    def memories(self) -> tuple[str, ...]:
        """Largest first."""
        return tuple(sorted({row.memory for row in self.rows}, key=percent, reverse=True))

    @property
    def workloads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(row.workload for row in self.rows))


def percent(memory: str) -> float:
    """12.5 of "12.5%"; 0 where a policy took what it took, so that these come last."""
    if memory == OWN:
        return 0.0
    try:
        value = float(memory.removesuffix("%"))
    except ValueError:
        value = math.nan
    if not memory.endswith("%") or not 0 < value < math.inf:
        raise InputError(f'memory "{memory}" of a row is no share of the full cache; write it as in 12.5%')
    return value


def sample_of(row: Row | PromptRow | Diagnostic) -> Sample:
    return row.workload, row.task, row.length, row.index


def read_sections(folders: Sequence[Path]) -> tuple[Section, ...]:
    """The runs of folders, grouped, in the order they came."""
    if not folders:
        raise InputError("no runs to report; give one or more folders that kvfold bench wrote")
    groups: dict[tuple[object, ...], list[tuple[Path, Recorded]]] = {}
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        recorded = read_run(folder)
        if not recorded.rows:
            raise InputError(f"{folder} holds no rows yet; finish the run first")
        _check(folder, recorded)
        run = recorded.run
        groups.setdefault((run.model, run.weights, run.seed, run.haystack), []).append((folder, recorded))
    return tuple(_section(group) for group in groups.values())


def _section(group: Sequence[tuple[Path, Recorded]]) -> Section:
    rows: dict[Key, tuple[Path, Row]] = {}
    prompts: dict[Sample, tuple[Path, PromptRow]] = {}
    devices: dict[Key, str] = {}
    for folder, recorded in group:
        for row in recorded.rows:
            _agree(folder, row, *rows.setdefault(row.key, (folder, row)))
            devices.setdefault(row.key, recorded.run.device)
        for prompt in recorded.prompts:
            _agree(folder, prompt, *prompts.setdefault(prompt.key, (folder, prompt)))
    return Section(
        runs=tuple(recorded.run for _, recorded in group),
        rows=tuple(row for _, row in rows.values()),
        prompts={key: prompt for key, (_, prompt) in prompts.items()},
        diagnostics=tuple({d.key: d for _, recorded in group for d in recorded.diagnostics}.values()),
        devices=devices,
    )


def _agree(folder: Path, one: Row | PromptRow, other_folder: Path, other: Row | PromptRow) -> None:
    if one is other:
        return
    mine, theirs = vars(_untimed(one)), vars(_untimed(other))
    names = [name for name, value in mine.items() if value != theirs[name]]
    if names:
        what = f"{', '.join(names)} of {' '.join(map(str, one.key))}"
        raise InputError(f"{other_folder} and {folder} differ in {what}; report them apart, or give one of them")


def _untimed(row: Row | PromptRow) -> Row | PromptRow:
    return row.untimed if isinstance(row, Row) else row


def _check(folder: Path, recorded: Recorded) -> None:
    """InputError for the first part with a wrong value."""
    lines: list[Run | Row | PromptRow | Diagnostic] = [*recorded.rows, *recorded.prompts, *recorded.diagnostics]
    for part in (recorded.run, *lines):
        wrong = wrong_fields(part)
        if wrong:
            told = ", ".join(f"{name} {getattr(part, name)!r}" for name in wrong)[:_MOST_TOLD]
            kind = type(part).__name__
            raise InputError(f"{folder} holds a {kind} with {told}; give a folder that the benchmark wrote")


def wrong_fields(part: Run | Row | PromptRow | Diagnostic) -> list[str]:
    """Names of fields that cannot be so."""
    wrong = [name for name, kind in _TYPES[type(part)].items() if not _fits(getattr(part, name), kind)]
    if not wrong and isinstance(part, Row):
        return _impossible(part)
    if not wrong and isinstance(part, Diagnostic):
        return [name for name in _BY_LAYER if len(getattr(part, name)) != len(part.layers)]
    return wrong


def _fits(value: object, kind: Any) -> bool:
    """Of the types that records declare: tuples are all tuple[X, ...]."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, arguments[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(each, arguments[1]) for each in value.values())
    if kind is float:
        return _is_number(value, (int, float)) and math.isfinite(value)  # type: ignore[arg-type]
    return _is_number(value, (int,)) if kind is int else kind is Any or isinstance(value, kind)


def _is_number(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _impossible(row: Row) -> list[str]:
    wrong = [name for name in _COUNTS if getattr(row, name) < 0]
    if row.score is not None and not 0 <= row.score <= 1:
        wrong.append("score")
    if row.score is not None and not row.full_bytes:
        wrong.append("full_bytes")
    return wrong
