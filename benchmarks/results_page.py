"""Write the tables of docs/results.md from runs kept under benchmarks/results.

    python benchmarks/results_page.py

Each run gets one table a mode: score out of 100 with half its 95 % interval, by policy and memory, each workload
counting the same; and, where one memory is worth a closer look, one by workload in that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvfold.bench.page import written
from kvfold.bench.record import MODES, Mode
from kvfold.bench.report.cells import Scope, estimate, scope_of, weighted
from kvfold.bench.report.merge import FULL, Section, read_sections

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
# Runs, and the memory whose scores are told by workload. Two samples a workload tell nothing by themselves.
RUNS = {"standard_qwen2.5-coder-1.5b": "12.5%", "quick_smollm2-135m": None}
BEGIN = "<!-- results: begin; written by `python benchmarks/results_page.py` -->"
END = "<!-- results: end -->"
TITLES = {"known": "Question known", "unknown": "Question unknown"}


def scores(scope: Scope, mode: Mode, policy: str, memory: str) -> str:
    """Mean and half width, or why there is none."""
    found = (cell for cell in scope.cells if (cell.mode, cell.policy, cell.memory) == (mode, policy, memory))
    cell = next(found, None)
    if cell is None or not scope.takes_part(cell):
        return "too small" if cell is not None and cell.failures else ""
    known = estimate(weighted(cell.scores, scope.common([cell])))
    return f"{100 * known.mean:.0f} ±{50 * (known.high - known.low):.0f}"


def memory_of(policy: str, memory: str) -> str:
    return "100%" if policy == FULL else memory


def tables(section: Section, split: str | None) -> Iterator[str]:
    everything = scope_of("all", section.rows)
    memories = [memory for memory in section.memories if memory != "100%"]
    for mode in MODES:
        yield table(
            [TITLES[mode], *memories],
            [[f"`{p}`", *(scores(everything, mode, p, memory_of(p, m)) for m in memories)] for p in section.policies],
        )
    if split is None:
        return
    names = sorted(section.workloads)
    scopes = [scope_of(name, [row for row in section.rows if row.workload == name]) for name in names]
    for mode in MODES:
        yield table(
            [f"{TITLES[mode]}, {split}", *names],
            [[f"`{p}`", *(scores(s, mode, p, memory_of(p, split)) for s in scopes)] for p in section.policies],
        )


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def about(section: Section, name: str) -> str:
    run = section.runs[0]
    samples = {row.workload: set[int]() for row in section.rows}
    for row in section.rows:
        samples[row.workload].add(row.index)
    told = ", ".join(f"{name} {len(found)}" for name, found in sorted(samples.items()))
    lengths = " and ".join(map(str, run.lengths))
    return (
        f"## {run.model}, {run.suite} suite\n\n[Report](reports/{name}.html). {run.dtype.split('/')[0]}, {run.device}; "
        f"prompts of {lengths} tokens, seed {run.seed}; samples: {told}; "
        f"commit {run.commit}, {run.started[:10]}.\n\n```\n{run.command}\n```"
    )


def body() -> str:
    parts: list[str] = []
    for name, split in RUNS.items():
        (section,) = read_sections([ROOT / "benchmarks" / "results" / name])
        parts += [about(section, name), *tables(section, split)]
    return "\n\n".join(parts)


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), BEGIN, END, body()), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
