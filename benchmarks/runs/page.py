"""Write the tables of docs/results.md from runs kept under benchmarks/results.

    python -m benchmarks.runs page

Runs are folders SUITE_MODEL. Each gets one table a mode: score out of 100 with half its 95 % interval, by policy and
memory, each workload counting the same; and, where one memory is worth a closer look, one by workload in that, or by
task of a single workload, and one of the compression ratios that were run. A cell says what was held where that is
below the memory at its head by more than a tenth: a codec that evicts nothing is the same in every memory it fits.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.commands import argument_parser
from benchmarks.docs_section import with_section
from benchmarks.rows import RESULTS, ROOT, markdown_table
from kvfold.bench.record import OWN, RUN, Mode
from kvfold.bench.report.cells import Scope, estimate, scope_of, weighted
from kvfold.bench.report.merge import FULL, Section, read_sections
from kvfold.bench.size_cache import WHOLE, share_of

PAGE = ROOT / "docs" / "results.md"
# In the order of the page, with the memory whose scores are told by workload or task: none where samples are too few or
# policies too many.
SUITES = {
    "standard": "12.5%", "longbench": "12.5%", "published": None, "methods": None, "tight": "6.25%",
    "curve": "3.125%", "quick": None,
}  # fmt: skip
BEGIN = "<!-- results: begin; written by `python -m benchmarks.runs page` -->"
END = "<!-- results: end -->"
TITLES = {"known": "Question-aware", "unknown": "Question-agnostic"}
HEADINGS = {"longbench": "LongBench-E", "published": "methods in their published forms"}  # runs of no suite
_MUCH_LESS = 0.9  # of the memory at the head of a column


def scores(scope: Scope, mode: Mode, policy: str, memory: str) -> str:
    """Mean and half width, or why there is none; the bytes too where they are not what the column says."""
    found = (cell for cell in scope.cells if (cell.mode, cell.policy, cell.memory) == (mode, policy, memory))
    cell = next(found, None)
    if cell is None or not scope.takes_part(cell):
        return "too small" if cell is not None and cell.failures else ""
    known = estimate(weighted(cell.scores, scope.common([cell])))
    is_told = memory == OWN or cell.share < _MUCH_LESS * share_of(memory)
    took = f" in {cell.share:.0%}" if is_told else ""
    return f"{100 * known.mean:.0f} ±{50 * (known.high - known.low):.0f}{took}"


def memory_of(policy: str, memory: str) -> str:
    return WHOLE if policy == FULL else memory


def tables(section: Section, split: str | None) -> Iterator[str]:
    everything = scope_of("all", section.rows)
    for mode in everything.samples:
        yield by_policy(TITLES[mode], section, mode, {memory: (everything, memory) for memory in columns(section)})
    if split is not None:
        scopes = {scope.name: (scope, split) for scope in parts(section)}
        for mode in everything.samples:
            yield by_policy(f"{TITLES[mode]}, {split}", section, mode, scopes)
        yield ratios(section)


def by_policy(title: str, section: Section, mode: Mode, shown: Mapping[str, tuple[Scope, str]]) -> str:
    """A scope and a memory under each head."""

    def line(policy: str) -> list[str]:
        cells = (scores(scope, mode, policy, memory_of(policy, memory)) for scope, memory in shown.values())
        return [f"`{policy}`", *cells]

    return markdown_table([title, *shown], [line(policy) for policy in section.policies])


def ratios(section: Section) -> str:
    """Tokens of the prompt over slots kept, the median over samples of the policies that evict."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in section.rows:
        if row.score is not None and (size := re.search(r"([\d.]+)x$", row.resolved)):
            found.setdefault((row.policy, row.memory), []).append(float(size[1]))
    memories = [memory for memory in columns(section) if any(key[1] == memory for key in found)]
    policies = [policy for policy in section.policies if any(key[0] == policy for key in found)]
    told = {key: f"{statistics.median(values):.3g}x" for key, values in found.items()}
    lines = [[f"`{policy}`", *(told.get((policy, memory), "") for memory in memories)] for policy in policies]
    return markdown_table(["Tokens per slot kept", *memories], lines)


def columns(section: Section) -> list[str]:
    """All memories, 100 % only where something but the full cache ran in no other."""
    ran = {(row.policy, row.memory) for row in section.rows if row.score is not None}
    elsewhere = {FULL, *(policy for policy, memory in ran if memory != WHOLE)}
    needs_whole = any(policy not in elsewhere for policy, _ in ran)
    return [memory for memory in section.memories if memory != WHOLE or needs_whole]


def parts(section: Section) -> list[Scope]:
    """By workload, or by task where there is one."""
    by_task = len(section.workloads) == 1
    names = sorted({row.task if by_task else row.workload for row in section.rows})
    return [scope_of(n, [row for row in section.rows if n == (row.task if by_task else row.workload)]) for n in names]


def about(section: Section, name: str) -> str:
    run = section.runs[0]
    samples = {(row.workload, row.task, row.length, row.index) for row in section.rows}
    told = ", ".join(f"{name} {count}" for name, count in sorted(Counter(sample[0] for sample in samples).items()))
    lengths = " and ".join(map(str, run.lengths))
    kind = name.partition("_")[0]
    filler = "" if kind == "longbench" else f" in {run.haystack}"
    return (
        f"## {run.model}, {HEADINGS.get(kind, f'{kind} suite')}\n\n{run.dtype.split('/')[0]}, {run.device}; "
        f"prompts of {lengths} tokens{filler}, seed {run.seed}; samples: {told}; "
        f"commit {run.commit}, {run.started[:10]}. The report, with intervals of every ranking: "
        f"`kvfold report benchmarks/results/{name}`.\n\n```\n{run.command}\n```"
    )


def body() -> str:
    found: list[str] = []
    for suite, split in SUITES.items():
        for folder in sorted(path.parent for path in RESULTS.glob(f"{suite}_*/{RUN}")):
            (section,) = read_sections([folder])
            found += [about(section, folder.name), *tables(section, split)]
    return "\n\n".join(found)


def main(arguments: Sequence[str]) -> None:
    argument_parser("runs page", __doc__).parse_args(arguments)
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), BEGIN, END, body()), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written")
