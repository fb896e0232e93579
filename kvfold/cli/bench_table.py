"""Output of `kvfold bench`: the list of workloads, and the results table of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvfold.cli import show
from kvfold.errors import DOCS_URL

if TYPE_CHECKING:
    from kvfold.bench.record import Recorded
    from kvfold.bench.summary import SummaryRow

_LEGEND = """
score and difference to the full cache in percent, with 95 % intervals; * excludes zero
{sent}resident bytes in percent of the full bf16 cache of the prompt
ms of a decode step at batch size 1; KL to the full cache in nats"""


def print_workloads() -> None:
    from kvfold.bench.workloads import workloads  # here: help comes at once

    table = show.Table("workload", "tasks", "tests", "source", "score")
    for each in workloads():
        tasks = [task if not each.lacks(task) else f"({task})" for task in each.tasks]
        shown = tasks if len(tasks) <= 14 else [*tasks[:12], f"… {len(tasks) - 12} more"]
        cells = (each.name, ", ".join(shown), each.summary, each.source, each.metric)
        table.add(*cells)
    table.print()
    print(f"Tasks in brackets read files: --data WORKLOAD.OPTION=FILE, see {DOCS_URL}/workloads.md")


def print_run(recorded: Recorded) -> None:
    """A table for every task, length and mode, then what is worth a remark."""
    from kvfold.bench.summary import above_memory, lines

    groups: dict[tuple[str, str, int, str], list[SummaryRow]] = {}
    for line in lines(recorded.rows):
        groups.setdefault((line.workload, line.task, line.length, line.mode), []).append(line)
    for (workload, task, length, mode), members in groups.items():
        print(f"\n{workload}:{task}, {length} tokens, question {mode}")
        _table(members).print()
    has_sent = any(line.sent_percent < 100 for members in groups.values() for line in members)
    print(_LEGEND.format(sent="tokens sent in percent of the prompt before shortening; " if has_sent else ""))
    above = above_memory(recorded.rows)
    if above:
        worst = max(row.resident_bytes / row.full_bytes for row in above)
        share = f"{len(above)} of {len(recorded.rows)} rows"
        print(f"{share} took over 1 % more than their memory, up to {worst:.1%} of the full cache")


def _table(lines: list[SummaryRow]) -> show.Table:
    from kvfold.bench.summary import difference_text, score_text

    has_sent = any(line.sent_percent < 100 for line in lines)
    sent = ("tokens sent",) if has_sent else ()
    table = show.Table("policy", numbers=("memory", "score", "difference", *sent, "bytes", "ms", "KL", "n"))
    for line in lines:
        ran = line.score is not None
        numbers = (
            *((f"{line.sent_percent:.1f}%" if ran else "",) if has_sent else ()),
            f"{line.bytes_percent:.1f}%" if ran else "",
            "" if line.decode_ms is None else f"{line.decode_ms:.1f}",
            "" if line.kl is None else f"{line.kl:.3f}",
            str(line.num_samples) if ran else "",
        )
        cells = (line.policy, line.memory, score_text(line), difference_text(line), *numbers)
        table.add(*cells)
    return table
