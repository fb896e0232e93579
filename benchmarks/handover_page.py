"""Write the second table of docs/handover.md from the run kept in benchmarks/results/handover_qwen2.5-coder-1.5b.

    python -m benchmarks.handover_page

What the next module of a pipeline is handed (the full cache, text that is cut, a compressed cache), the bytes of its
cache, and the score on facts that module 1 has read and that module 2 has written, with 95 % intervals.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from benchmarks.commands import run_main
from benchmarks.docs_section import Section
from benchmarks.rows import RESULTS, ROOT, markdown_table
from kvfold.bench.record import Recorded, read_run
from kvfold.bench.size_cache import FULL
from kvfold.bench.summary import SummaryRow, lines, score_text

KEPT = RESULTS / "handover_qwen2.5-coder-1.5b"
TASKS = ("first", "second")
_CUT = re.compile(r"shorten\((head|tail), (\d+)tok\b")
_ENDS = {"head": "first", "tail": "last"}


def body(recorded: Recorded) -> str:
    """One table; the full cache, then texts that are cut, then compressed caches."""
    found: dict[tuple[str, str], dict[str, SummaryRow]] = {}
    for line in lines(recorded.rows):
        found.setdefault((line.policy, line.memory), {})[line.task] = line
    arms = sorted(found.items(), key=lambda arm: (arm[0][0] != FULL, not _CUT.match(arm[0][0])))
    cells = [
        [
            handed(policy),
            f"{max(line.bytes_percent for line in by_task.values()):.0f} %",
            *(score_text(by_task[task]) for task in TASKS),
        ]
        for (policy, _), by_task in arms
    ]
    table = markdown_table(["handed over", "bytes of the full cache", *(f"`{task}`" for task in TASKS)], cells)
    return f"{about(recorded)}:\n\n{table}"


def handed(policy: str) -> str:
    """What the next module is given."""
    if policy == FULL:
        return "everything, full cache"
    if cut := _CUT.match(policy):
        return f"the {_ENDS[cut[1]]} {int(cut[2]):,} tokens as text"
    return f"everything, `{policy}`"


def about(recorded: Recorded) -> str:
    run = recorded.run
    lengths = " and ".join(f"{length:,}" for length in run.lengths)
    where = f"{run.model}, {run.device}, commit {run.commit}, {run.started[:10]}"
    return f"{where}, {run.samples} contexts of {lengths} tokens, scores with 95 % intervals"


SECTION = Section(ROOT / "docs" / "handover.md", "handover", "handover_page", lambda: body(read_run(KEPT)))


def main(arguments: Sequence[str]) -> None:
    SECTION.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
