"""The table of all workloads, as docs/workloads.md shows it: `python -m kvfold.bench.workloads.listing` prints it."""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.bench.workloads.base import workloads

_COLUMNS = ("name", "tasks", "what it tests", "source", "score", "differences from the source")


def table() -> str:
    """Markdown, a row for each workload; tasks that need something are in brackets."""
    rows: list[Sequence[str]] = [_COLUMNS, ["---"] * len(_COLUMNS)]
    for found in workloads():
        tasks = ", ".join(task if not found.lacks(task) else f"({task})" for task in found.tasks)
        rows.append((f"`{found.name}`", tasks, found.summary, found.source, found.metric, found.differences))
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


if __name__ == "__main__":
    print(table())
