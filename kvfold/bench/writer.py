"""Writer of a run folder: created once, bound to one configuration, appended to row by row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvfold.bench.record import (
    DIAGNOSTICS,
    PROMPTS,
    ROWS,
    RUN,
    Diagnostic,
    PromptRow,
    Row,
    Run,
    append_lines,
    commits_of,
    drop_cut_line,
    read_description,
    read_lines,
    write_run,
)
from kvfold.errors import InputError


class RunWriter:
    """Appends rows that are missing."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder = folder
        if (folder / RUN).exists():
            there = read_description(folder)
            _check_same(folder, there, run)
            if (commits := commits_of((there, run))) != there.commit:
                write_run(folder, replace(there, commit=commits))
        elif folder.exists() and any(folder.iterdir()):
            raise InputError(f"{folder} holds other files and no run; name another folder with --out")
        else:
            write_run(folder, run)
        for name in (ROWS, PROMPTS, DIAGNOSTICS):
            drop_cut_line(folder / name)
        self.done = {row.key for row in read_lines(Row, folder / ROWS)}
        self._prompts = {row.key for row in read_lines(PromptRow, folder / PROMPTS)}
        self._diagnostics = {row.key for row in read_lines(Diagnostic, folder / DIAGNOSTICS)}

    def add_prompts(self, rows: Iterable[PromptRow]) -> None:
        self._append(PROMPTS, rows, self._prompts)

    def add(self, rows: Iterable[Row], diagnostics: Iterable[Diagnostic]) -> None:
        """Diagnostics first: rows tell that a batch is done."""
        self._append(DIAGNOSTICS, diagnostics, self._diagnostics)
        self._append(ROWS, rows, self.done)

    def _append(self, name: str, rows: Iterable[Row | PromptRow | Diagnostic], known: set[Any]) -> None:
        new = [row for row in rows if row.key not in known]
        append_lines(self.folder / name, new)
        known.update(row.key for row in new)


def _check_same(folder: Path, there: Run, run: Run) -> None:
    """InputError if the folder holds a run of another configuration."""
    found = there.configuration | {"shard": there.shard}
    wanted = run.configuration | {"shard": run.shard}
    for name, value in wanted.items():
        if found[name] != value:
            raise InputError(
                f"{folder} holds a run with {name} {_text(found[name])}, not {_text(value)}; name another folder with "
                "--out, or give the options of that run"
            )


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
