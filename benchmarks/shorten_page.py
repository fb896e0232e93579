"""Write the tables and the plot of docs/shorten.md from runs kept under benchmarks/results/shorten_MODEL.

    python -m benchmarks.shorten_page

Tables: policies that shorten against the full prompt, by task (scores out of 100, and the mean difference to the full
prompt with its 95 % interval), on LongBench-E and on rag; `graph` against truncation and random sentences at the same
tokens sent; passkeys in prompts of 30,000 tokens; and shortening stacked with compression against compression alone.
Differences are of samples that both ran. The plot (shorten_plot.py) shows scores over tokens sent.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import fmean

from benchmarks.commands import argument_parser, run_main
from benchmarks.docs_section import write_section
from benchmarks.rows import RESULTS, ROOT, markdown_table
from benchmarks.shorten_plot import draw
from kvfold.bench.record import Recorded, Row, read_run
from kvfold.bench.report.merge import FULL
from kvfold.bench.statistics import Estimate, paired_difference

PAGE = ROOT / "docs" / "shorten.md"
KEPT = RESULTS / "shorten_qwen2.5-coder-1.5b"
BEGIN = "<!-- shortening: begin; written by `python -m benchmarks.shorten_page` -->"
END = "<!-- shortening: end -->"
PLOT = ROOT / "docs" / "shorten.svg"
BASELINES = ("head", "tail", "ends", "shuffle")
RUNS = ("longbench", "rag", "longbench_model", "passkey", "stacked")
CACHE = "kvzip + global + 8x + int4"

Scores = dict[tuple[str, int], float]  # by task and sample


def scores(rows: Sequence[Row], policy: str) -> Scores:
    return {(row.task, row.index): row.score for row in rows if row.policy == policy and row.score is not None}


def by_task(found: Scores) -> dict[str, list[float]]:
    tasks: dict[str, list[float]] = {}
    for (task, _), score in sorted(found.items()):
        tasks.setdefault(task, []).append(score)
    return tasks


def difference(mine: Scores, theirs: Scores) -> Estimate:
    """Over the samples of both, every task counting the same."""
    shared = sorted(set(mine) & set(theirs))
    count = {task: sum(key[0] == task for key in shared) for task in {key[0] for key in shared}}
    weight = {key: len(shared) / (len(count) * count[key[0]]) for key in shared}
    return paired_difference(*([weight[key] * each[key] for key in shared] for each in (mine, theirs)))


def told(found: Estimate) -> str:
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def short(policy: str) -> str:
    """`rank, 4x` of `shorten(rank, 4x, keep=none)`."""
    return policy.replace(", keep=none", "").replace("shorten(", "").removesuffix(")") if "+" not in policy else policy


def task_table(rows: Sequence[Row]) -> str:
    """Every policy on every task, and its mean difference to the full prompt."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    policies.sort(key=lambda policy: (policy != FULL, sent_share(rows, policy) < 0.4, sent_share(rows, policy) < 0.2))
    tasks, full = list(by_task(scores(rows, FULL))), scores(rows, FULL)
    lines = []
    for policy in policies:
        found = scores(rows, policy)
        cells = [f"{100 * fmean(by_task(found)[task]):.1f}" for task in tasks]
        behind = "" if policy == FULL else told(difference(found, full))
        lines.append([f"`{short(policy)}`", f"{sent_share(rows, policy):.0%}", *cells, behind])
    counts = [f"{task} ({len(by_task(full)[task])})" for task in tasks]
    return markdown_table(["selector", "tokens sent", *counts, "against the full prompt"], lines)


def sent_share(rows: Sequence[Row], policy: str) -> float:
    return fmean(row.sent_share for row in rows if row.policy == policy)


def against_table(rows: Sequence[Row]) -> str:
    """`graph` less each baseline that asks no question either, at the same size, by task."""
    tasks = list(by_task(scores(rows, FULL)))
    lines = []
    for size in ("4x", "2x"):
        mine = scores(rows, f"shorten(graph, {size}, keep=none)")
        for baseline in BASELINES:
            theirs = scores(rows, f"shorten({baseline}, {size}, keep=none)")
            if theirs:
                of_tasks = [told(difference(only(mine, task), only(theirs, task))) for task in tasks]
                lines.append([f"`{baseline}, {size}`", *of_tasks, told(difference(mine, theirs))])
    return markdown_table(["`graph` less", *tasks, "all"], lines)


def only(found: Scores, task: str) -> Scores:
    return {key: score for key, score in found.items() if key[0] == task}


def passkey_table(rows: Sequence[Row]) -> str:
    policies = list(dict.fromkeys(row.policy for row in rows))
    found = {policy: 100 * fmean(scores(rows, policy).values()) for policy in policies}
    lines = [[f"`{policy}`", f"{sent_share(rows, policy):.0%}", f"{score:.0f}"] for policy, score in found.items()]
    return markdown_table(["policy", "tokens sent", "passkey found, %"], lines)


def stacked_table(rows: Sequence[Row]) -> str:
    """Compression alone and behind shortening; differences on the samples that both ran."""
    alone, full = scores(rows, CACHE), scores(rows, FULL)
    stacks = [policy for policy in dict.fromkeys(row.policy for row in rows) if policy not in (FULL, CACHE)]
    lines = []
    for task in by_task(full):
        of_task = [only(each, task) for each in (full, alone)]
        cells = [f"{100 * fmean(each.values()):.1f}" for each in of_task]
        for policy in stacks:
            found = only(scores(rows, policy), task)
            cells.append(f"{100 * fmean(found.values()):.1f}, {told(difference(found, of_task[1]))}, n {len(found)}")
        lines.append([task, *cells])
    held = {policy: resident_share(rows, policy) for policy in (CACHE, *stacks)}
    head = ["task", "full", *(f"`{policy}` in {share:.1%}" for policy, share in held.items())]
    return markdown_table(head, lines)


def resident_share(rows: Sequence[Row], policy: str) -> float:
    return fmean(row.resident_bytes / row.full_bytes for row in rows if row.policy == policy and row.score is not None)


def about(recorded: Recorded) -> str:
    run = recorded.run
    lengths = " and ".join(f"{length:,}" for length in run.lengths)
    return f"{run.model}, {run.device}, prompts of up to {lengths} tokens, seed {run.seed}, {run.started[:10]}"


def body(runs: Mapping[str, Recorded]) -> str:
    tables = [
        ("LongBench-E, question-aware", "longbench", task_table),
        ("LongBench-E, `graph` against baselines at equal tokens", "longbench", against_table),
        ("rag, question-aware", "rag", task_table),
        ("rag, `graph` against baselines at equal tokens", "rag", against_table),
        ("LongBench-E, selectors that ask the model", "longbench_model", task_table),
        ("Passkey", "passkey", passkey_table),
        ("Stacked, question-agnostic", "stacked", stacked_table),
    ]
    return "\n\n".join(f"{title}; {about(runs[name])}:\n\n{table(runs[name].rows)}" for title, name, table in tables)


def main(arguments: Sequence[str]) -> None:
    argument_parser("shorten_page", __doc__).parse_args(arguments)
    runs = {name: read_run(KEPT / name) for name in RUNS}
    write_section(PAGE, BEGIN, END, body(runs))
    draw({"LongBench-E question answering": runs["longbench"].rows, "rag": runs["rag"].rows}, PLOT)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
