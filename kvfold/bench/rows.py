"""Tidy rows of a run: one JSON line per (prompt, policy, mode) that says everything it depends on.

A file of rows grows by appending and is never rewritten, so an interrupted run goes on where it stopped. For keeping,
rows condense to one line per (policy, size, mode, task) that still holds the score of every prompt: tables computed
from either are the same.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from kvfold.errors import InputError

Mode = Literal["known", "unknown"]
Key = tuple[int, str, str, str]  # prompt, policy, size, mode
MODES: tuple[Mode, ...] = ("known", "unknown")
OWN_POLICIES = "scorers"  # the plan of runs that name none
OWN_PROSE = "own prose"  # the name of the haystack that the project brings along


@dataclass(frozen=True)
class Facts:
    """What all rows of a run share. The first part is the workload, which a file must not mix."""

    model: str
    tokens: int
    seed: int
    haystack: str
    dtype: str
    device: str
    commit: str
    versions: str
    date: str
    plan: str = OWN_POLICIES  # of what was compared; rows from before there were plans do not name theirs

    @property
    def workload(self) -> dict[str, str | int]:
        names = ("model", "tokens", "seed", "haystack", "plan")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Row:
    """One answer. Bytes and slots are those after the compression, before question (if unknown) and answer are read;
    without a score, `note` says why the policy could not run."""

    facts: Facts
    prompt: int
    task: str
    policy: str  # without its size
    size: str  # "" where nothing is evicted
    mode: Mode
    expected: tuple[str, ...]
    answer: str = ""
    score: float | None = None
    bytes: int = 0
    full_bytes: int = 0
    slots: float = 0.0  # per head, on average
    note: str = ""

    @property
    def key(self) -> Key:
        return self.prompt, self.policy, self.size, self.mode


@dataclass(frozen=True)
class Cell:
    """All prompts of one task under one policy, size and mode."""

    facts: Facts
    policy: str
    size: str
    mode: Mode
    task: str
    scores: tuple[float, ...]  # empty where the policy could not run
    bytes_ratio: float  # of the ordinary bf16 cache's bytes, mean over prompts
    slots: float
    note: str = ""


_Line = TypeVar("_Line", Row, Cell)


def to_json(line: Row | Cell) -> str:
    """One flat object: the facts come last, so that the start of a line tells what it is."""
    found = asdict(line)
    facts = found.pop("facts")
    return json.dumps(found | facts, ensure_ascii=False)


def _from_json(kind: type[_Line], found: dict[str, Any]) -> _Line:
    shared = {field.name: found.pop(field.name) for field in fields(Facts) if field.name != "plan"}
    facts = Facts(**shared, plan=found.pop("plan", OWN_POLICIES))
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return kind(facts, **values)


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none if it does not exist; a last line that was cut off is left out."""
    return list(_parse(Row, path)) if path.exists() else []


def read_cells(*paths: Path) -> list[Cell]:
    """The cells of files of cells or of rows. The rows of several files, such as the shards of a run, count as one."""
    cells: list[Cell] = []
    rows: list[Row] = []
    for path in paths:
        if _holds_cells(path):
            cells += _parse(Cell, path)
        else:
            rows += _parse(Row, path)
    found = cells + condense(rows)
    _check_workload(found)
    return found


def _holds_cells(path: Path) -> bool:
    if not path.exists():
        raise InputError(f"{path} does not exist; give the file that a run wrote")
    first = next(_objects(path), None)
    if first is None:
        raise InputError(f"{path} holds no results yet; run it first")
    return "scores" in first


def _check_workload(cells: list[Cell]) -> None:
    for cell in cells:
        if cell.facts.workload != cells[0].facts.workload:
            both = f"{cells[0].facts.workload} and {cell.facts.workload}"
            raise InputError(f"these are results of {both}; a table holds one workload, so give the files of one")


def _parse(kind: type[_Line], path: Path) -> Iterator[_Line]:
    for number, found in enumerate(_objects(path), 1):
        try:
            yield _from_json(kind, found)
        except (KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}, is no {kind.__name__.lower()} of a needle run: {error}") from None


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}, is not JSON: {error}") from None


class RowFile:
    """Appends rows to a file, each flushed; knows which ones it already holds."""

    def __init__(self, path: Path, facts: Facts) -> None:
        self.path = path
        rows = read_rows(path)
        for row in rows:
            if row.facts.workload != facts.workload:
                raise InputError(f"{path} holds rows of {row.facts.workload}, not {facts.workload}; name another file")
        self.done = {row.key for row in rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_cut_line(path)

    def append(self, rows: Iterable[Row]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(to_json(row) + "\n")
                file.flush()
                self.done.add(row.key)


def _drop_cut_line(path: Path) -> None:
    """A killed run may leave half a line, to which the next row would be glued."""
    if path.exists():
        content = path.read_bytes()
        os.truncate(path, content.rfind(b"\n") + 1)


def condense(rows: Iterable[Row]) -> list[Cell]:
    """One cell per (facts, policy, size, mode, task), in the order of their first rows. No prompt may count twice."""
    groups: dict[tuple[Facts, str, str, Mode, str], list[Row]] = defaultdict(list)
    seen: set[Key] = set()
    for row in rows:
        if row.key in seen:
            what = f'prompt {row.prompt} of "{row.policy} {row.size}", {row.mode}'
            raise InputError(f"{what}, occurs twice; give each shard of a run once")
        seen.add(row.key)
        groups[row.facts, row.policy, row.size, row.mode, row.task].append(row)
    return [_cell(Cell(*key, (), 0.0, 0.0), members) for key, members in groups.items()]


def _cell(empty: Cell, rows: list[Row]) -> Cell:
    ran = [row for row in sorted(rows, key=lambda row: row.prompt) if row.score is not None]
    return Cell(
        empty.facts,
        empty.policy,
        empty.size,
        empty.mode,
        empty.task,
        scores=tuple(row.score for row in ran if row.score is not None),
        bytes_ratio=_mean([row.bytes / row.full_bytes for row in ran]),
        slots=_mean([row.slots for row in ran]),
        note=next((row.note for row in rows if row.note), ""),
    )


def _mean(values: list[float]) -> float:
    return round(statistics.fmean(values), 4) if values else 0.0
