"""The page: what the template shows of each section, with style and script inline, so that one file opens without a
network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvfold.atomic_io import write_whole
from kvfold.bench.record import MODES, Run
from kvfold.bench.report.cells import Scope, estimate, points, scope_of, weighted
from kvfold.bench.report.charts import Axis, bars, plot
from kvfold.bench.report.markup import Styles, bytes_text, counted, listed, named, styles_of
from kvfold.bench.report.merge import FULL, Section, percent, read_sections, sample_of
from kvfold.bench.report.regressions import embedded, regressions, shown
from kvfold.bench.report.tables import (
    Cost,
    cost_table,
    costs_of,
    failures,
    fidelity_table,
    heat_maps,
    rankings,
    scorer_table,
    winners,
)

OVERALL = "all workloads"


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Read the run folders and write the page, whole or not at all."""
    write_whole(out, page(read_sections(runs)))


def page(sections: Sequence[Section]) -> str:
    """The whole document. Without the script all sections stand below each other."""
    names = section_names(sections)
    shown_sections = [_section(section, name) for section, name in zip(sections, names, strict=True)]
    return _environment().get_template("report.html.j2").render(names=names, sections=shown_sections)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("kvfold.bench", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    loader = made.loader
    assert loader is not None
    made.globals["asset"] = lambda name: Markup(loader.get_source(made, name)[0])
    made.globals["counted"] = counted
    return made


def section_names(sections: Sequence[Section]) -> list[str]:
    """The model, with what tells its sections apart."""
    models = [section.runs[0].model for section in sections]
    runs = [section.runs[0] for section in sections]
    longer = [f"{run.model}, seed {run.seed}, {run.haystack}, weights {run.weights[:8]}" for run in runs]
    return [name if models.count(name) == 1 else long for name, long in zip(models, longer, strict=True)]


def _section(section: Section, name: str) -> dict[str, Any]:
    """What the template reads."""
    scopes, styles = _scopes(section), styles_of(section.policies)
    lost = regressions(section)
    return {
        "name": name,
        "origin": _origin(section.runs),
        "lead": f"{_asked(section)} {_scored(scopes[0])}",
        "winners": winners(scopes[0], styles),
        "legend": [(style.number, named(policy, styles)) for policy, style in styles.items()],
        "scopes": {scope.name: (_panels(scope, styles), *_folds(scope, styles)) for scope in scopes},
        "heat": heat_maps(section, styles),
        **_costs(section, styles),
        "fidelity": fidelity_table(section, styles),
        "scorers": scorer_table(section, styles),
        "num_lost": len(lost),
        "lost": shown(lost),
        "lost_json": [asdict(each) for each in embedded(lost)],
        "failures": failures(section, styles),
        "num_rows": len(section.rows),
        "num_failed": sum(row.score is None for row in section.rows),
        "runs": [(run.command, _facts(run)) for run in section.runs],
    }


def _scopes(section: Section) -> list[Scope]:
    """All workloads first, then each where there are several."""
    each = [scope_of(name, (row for row in section.rows if row.workload == name)) for name in section.workloads]
    return [scope_of(OVERALL, section.rows), *each] if len(each) > 1 else each


def _origin(runs: Sequence[Run]) -> str:
    """kvfold 0.1.0, measured 2026-11-17."""
    versions = sorted({run.versions["kvfold"] for run in runs if "kvfold" in run.versions})
    days = sorted({run.started[:10] for run in runs})
    return (
        f"{' '.join(['kvfold', listed(versions)]).strip()}, measured {' to '.join(dict.fromkeys((days[0], days[-1])))}"
    )


def _asked(section: Section) -> str:
    samples = {sample_of(row) for row in section.rows}
    tokens = [row.prompt_tokens for row in section.rows if row.prompt_tokens]
    lengths = dict.fromkeys((min(tokens), max(tokens))) if tokens else {}
    long = f"of {' to '.join(f'{length:,}' for length in lengths)} tokens " if lengths else ""
    rivals = sum(policy != FULL for policy in section.policies)
    ways = f"under {rivals} compression polic{'y' if rivals == 1 else 'ies'}" if rivals else "without compression"
    beside = "with its full cache and " if FULL in section.policies and rivals else ""
    prompts = f"{counted(len(samples), 'prompt')} {long}from {counted(len(section.workloads), 'workload')}"
    return f"{section.runs[0].model} answered {prompts}, {beside}{ways}."


def _scored(overall: Scope) -> str:
    told = []
    for mode in MODES:
        if full := overall.full(mode):
            score = estimate(weighted(full.scores, overall.common([full])))
            told.append(f"{100 * score.mean:.1f} (question {mode})")
    if not told:
        return "The full cache was not run, so nothing here says what compression costs."
    return f"With the full cache it scored {listed(told)} out of 100."


def _panels(scope: Scope, styles: Styles) -> dict[str, Markup]:
    """A figure for each mode, on one axis."""
    found = {mode: points(scope, mode) for mode in MODES if mode in scope.samples}
    axis = Axis([point.share for listed in found.values() for point in listed])
    title = f"Score against bytes, {scope.name}, question {{}}; numbers are in the tables"
    return {mode: plot(listed, axis, styles, title.format(mode)) for mode, listed in found.items()}


def _folds(scope: Scope, styles: Styles) -> tuple[Mapping[str, Any], str | None]:
    """Rankings by memory, and the middle memory, whose tables are open."""
    found = rankings(scope, styles)
    return found, sorted(found, key=percent)[(len(found) - 1) // 2] if found else None


def _costs(section: Section, styles: Styles) -> dict[str, Any]:
    """A table for each length, and bars by memory for the longest prompts, question-agnostic if that was measured."""
    costs = sorted(costs_of(section), key=lambda cost: cost.length)
    by_length = {length: list(found) for length, found in groupby(costs, key=lambda cost: cost.length)}
    drawn: dict[str, Any] = {}
    if by_length:
        longest = list(by_length.values())[-1]
        mode, device = max(cost.mode for cost in longest), longest[0].device  # "unknown" follows "known"
        longest = [cost for cost in longest if (cost.mode, cost.device) == (mode, device)]
        for memory in section.memories:
            found = [cost for cost in longest if cost.memory == memory and cost.policy != FULL]
            full = [cost for cost in longest if cost.policy == FULL]
            drawn |= {memory: _bars([*full, *found], styles, memory)} if found else {}
    tables = {length: cost_table(found, styles) for length, found in by_length.items()}
    return {"costs": tables, "bars": drawn}


def _bars(costs: Sequence[Cost], styles: Styles, memory: str) -> dict[str, Markup]:
    sizes = {"Resident bytes": "resident_bytes", "Bytes read per decode step": "bytes_per_step"}
    made = {}
    for title, name in sizes.items():
        values = [(cost.policy, cost.mean_bytes(name)) for cost in costs]
        made[title] = bars([(p, v, bytes_text(v)) for p, v in values], styles, f"{title} in {memory}")
    steps = [(cost.policy, step, f"{step:.3g} ms") for cost in costs if (step := cost.median("decode_ms")) is not None]
    if steps:
        made["Decode step of the batch"] = bars(steps, styles, f"Milliseconds of a decode step in {memory}")
    return made


def _facts(run: Run) -> dict[str, object]:
    return {
        "commit": run.commit,
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "device": run.device,
        "model": f"{run.model}, {run.dtype}, weights {run.weights[:16]}",
        "seed": run.seed,
        "samples": f"{run.samples} of each task, {listed([f'{length:,}' for length in run.lengths])} tokens",
        "haystack": run.haystack,
        "started": run.started,
        "shard": run.shard,
        **run.options,
    }
