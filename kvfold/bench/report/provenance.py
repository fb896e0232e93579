"""Failures and provenance: commands, commits, versions, devices, seeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvfold.bench.record import Run
from kvfold.bench.report.html import Html, join, table, tag, text
from kvfold.bench.report.merge import Section
from kvfold.bench.report.policy_style import PolicyStyle
from kvfold.bench.report.text import counted, listed, named

_HEADINGS = ("policy", "memory", "question", "workload", "why", "samples")


def failures(section: Section, styles: Mapping[str, PolicyStyle]) -> Html:
    """Cells without a score, counted by reason."""
    found: Counter[tuple[str, str, str, str, str]] = Counter(
        (row.policy, row.memory, row.mode, row.workload, row.note or "no score")
        for row in section.rows
        if row.score is None
    )
    if not found:
        return tag("p", text("Every policy ran at every memory that was asked for."))
    lines = [
        [named(policy, styles), *map(text, (memory, mode, workload, note, count))]
        for (policy, memory, mode, workload, note), count in found.items()
    ]
    told = f"{counted(found.total(), 'row')} of {len(section.rows):,} have no score and count in no mean."
    return join([tag("p", text(told)), table(_HEADINGS, lines, words=5)])


def origin(section: Section) -> Html:
    """One block for each run."""
    return join(_run(run) for run in section.runs)


def _run(run: Run) -> Html:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    facts = {
        "commit": run.commit,
        "versions": versions,
        "device": run.device,
        "model": f"{run.model}, {run.dtype}, weights {run.weights[:16]}",
        "seed": run.seed,
        "samples": f"{run.samples} of each task, {listed([f'{length:,}' for length in run.lengths])} tokens",
        "haystack": run.haystack,
        "started": run.started,
        "shard": run.shard,
        **run.options,
    }
    pairs = join(join([tag("dt", text(name)), tag("dd", text(value))]) for name, value in facts.items())
    return tag("div", tag("pre", text(run.command), tabindex=0), tag("dl", pairs, class_="facts"), class_="run")
