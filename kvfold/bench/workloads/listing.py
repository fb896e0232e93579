"""The table of all workloads, as docs/workloads.md shows it: `python -m kvfold.bench.workloads.listing` prints it."""

from __future__ import annotations

from collections.abc import Iterator

from kvfold.bench.workloads.base import Workload, workloads

_COLUMNS = ("name", "tasks", "what it tests", "source", "score", "differences from the source")


def table() -> str:
    """Markdown, a row for each workload."""
    return "\n".join(_rows())


def _rows() -> Iterator[str]:
    yield _row(*_COLUMNS)
    yield _row(*("---" for _ in _COLUMNS))
    for found in workloads():
        yield _row(f"`{found.name}`", _tasks(found), found.summary, found.source, found.metric, found.differences)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _tasks(found: Workload) -> str:
    """Tasks that need something are in brackets."""
    return ", ".join(task if not found.lacks(task) else f"({task})" for task in found.tasks)


if __name__ == "__main__":
    print(table())
