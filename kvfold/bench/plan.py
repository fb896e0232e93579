"""The plan of a run: tasks, lengths, samples in batches, and options of workloads that read files.

Batches alternate over lengths and tasks, so that an interrupted run is balanced; they are numbered over the whole run,
and a shard takes every n-th: several processes divide a run without communication, and shards take about equally long.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvfold.bench.workloads import Workload, find
from kvfold.errors import InputError


@dataclass(frozen=True)
class Task:
    """One task of a workload."""

    workload: Workload
    name: str

    @property
    def label(self) -> str:
        return f"{self.workload.name}:{self.name}"


@dataclass(frozen=True)
class Batch:
    """Samples of one task and length that run together."""

    task: Task
    length: int
    indices: tuple[int, ...]


def tasks(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> list[Task]:
    """ "kv" is every task of a workload that is ready, "ruler:vt" one of them."""
    if not names:
        raise InputError("no workload is named; name one or more, such as passkey or ruler:vt")
    found: dict[str, Task] = {}
    for name in names:
        workload_name, _, task = name.partition(":")
        workload = find(workload_name, **options.get(workload_name, {}))
        for each in [task] if task else workload.ready or workload.tasks:
            workload.check(each)
            found[f"{workload_name}:{each}"] = Task(workload, each)
    return list(found.values())


def batches(
    tasks: Sequence[Task], lengths: Sequence[int], samples: int, at_once: int, shard: Shard | None = None
) -> list[Batch]:
    """`at_once` samples a batch, and all that share a context."""
    found = [batch for round in _rounds(tasks, lengths, samples, at_once) for batch in round]
    return [batch for number, batch in enumerate(found) if (shard or Shard()).takes(number)]


def _rounds(tasks: Sequence[Task], lengths: Sequence[int], samples: int, at_once: int) -> Iterator[list[Batch]]:
    number = 0
    while True:
        places = [(length, task) for length in lengths for task in tasks]
        found = [Batch(task, length, _indices(task, samples, at_once, number)) for length, task in places]
        if not any(batch.indices for batch in found):
            return
        yield [batch for batch in found if batch.indices]
        number += 1


def _indices(task: Task, samples: int, at_once: int, number: int) -> tuple[int, ...]:
    sharing = task.workload.num_sharing(task.name)
    size = sharing * max(1, at_once // sharing)
    end = min(task.workload.num_samples(task.name, samples), (number + 1) * size)
    return tuple(range(number * size, end))


def workload_options(given: Sequence[str]) -> dict[str, dict[str, Any]]:
    """["ruler.squad=FILE"] -> {"ruler": {"squad": Path("FILE")}}"""
    found: dict[str, dict[str, Any]] = {}
    for text in given:
        where, separator, value = text.partition("=")
        name, dot, option = where.partition(".")
        if not separator or not dot:
            raise InputError(f'"{text}" is no option of a workload; write for example ruler.squad=dev-v2.0.json')
        found.setdefault(name, {})[option] = _typed(find(name), option, value)
    return found


def _typed(workload: Workload, option: str, value: str) -> Any:
    """Options are paths or plain text."""
    kinds = {each.name: str(each.type) for each in fields(workload)}  # type: ignore[arg-type]  # all are dataclasses
    return Path(value) if "Path" in kinds.get(option, "") else value


def digests(options: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What each option names, in words that change with the content of a file."""
    return {f"{name}.{option}": _digest(value) for name, each in options.items() for option, value in each.items()}


def _digest(value: Any) -> str:
    if not isinstance(value, Path) or not value.is_file():
        return str(value)
    return f"{value.name} {hashlib.sha256(value.read_bytes()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Shard:
    index: int = 0
    num_shards: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.num_shards:
            raise InputError(f"shard {self} does not exist; shards of {self.num_shards} are 0 to {self.num_shards - 1}")

    @classmethod
    def parse(cls, text: str) -> Shard:
        """ "3/12": the share 3 of 12, counted from 0."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        if match is None:
            raise InputError(f'"{text}" is no shard; write I/N, for example 0/8 for the first of eight')
        return cls(int(match[1]), int(match[2]))

    def takes(self, item: int) -> bool:
        return item % self.num_shards == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.num_shards}"
