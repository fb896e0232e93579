"""Workloads that read rows from files: which row a sample is, and how rows are loaded.

A seed is an order of the rows, so the first samples of a run are a random subset, another seed gives another one, and
no row comes twice.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from kvfold.bench.workloads.base import Setting, Workload
from kvfold.errors import InputError

Row = Mapping[str, Any]


class FileWorkload(Workload):
    """A workload some of whose tasks have as many samples as their files have rows."""

    @abstractmethod
    def rows(self, task: str) -> Sequence[Row] | None:
        """The rows of a task in the order of their file; None for a task that makes its own samples, without end."""

    def num_samples(self, task: str, wanted: int) -> int:
        rows = self.rows(task)
        return wanted if rows is None else min(wanted, len(rows))

    def row(self, setting: Setting, task: str, index: int) -> Row:
        """The row of a sample under the setting's seed."""
        rows = self.rows(task) or ()
        if index >= len(rows):
            raise InputError(
                f"task {task} of workload {self.name} has no sample {index}; its file has {len(rows)} rows"
            )
        order = Random(f"{setting.seed}/{self.name}/{task}/order").sample(range(len(rows)), len(rows))
        return rows[order[index]]


@lru_cache(maxsize=64)
def read_rows(path: Path) -> tuple[Row, ...]:
    """The objects of a file: one JSON list, or one object a line."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.split("\n") if line.strip()]  # splitlines would break at U+2028 in a string
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; give a file that can") from None
    except ValueError:
        raise InputError(f"{path} is neither a JSON list nor one JSON object a line in UTF-8") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{path} holds no rows; give a JSON list of objects, or one object a line")
    return tuple(rows)


def want(row: Row, *keys: str, where: str) -> None:
    """Refuse a row of another format by the key it lacks."""
    for key in keys:
        if key not in row:
            raise InputError(f'a row of {where} has no "{key}"; it has {", ".join(sorted(row))}')
