"""The page: sections in order, with style, script and data inline, so that one file opens without a network."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

from kvfold.bench.report.cells import Scope, scope_of
from kvfold.bench.report.costs import cost_table
from kvfold.bench.report.fidelity import fidelity
from kvfold.bench.report.headline import headline
from kvfold.bench.report.heatmap import heat_maps
from kvfold.bench.report.html import NOTHING, Html, buttons, embedded_json, join, tag, text
from kvfold.bench.report.merge import Section
from kvfold.bench.report.policy_style import styles
from kvfold.bench.report.provenance import failures, origin
from kvfold.bench.report.quality import quality
from kvfold.bench.report.regressions import article, embedded, regressions, shown
from kvfold.bench.report.text import counted, listed

OVERALL = "all workloads"


def page(sections: Sequence[Section]) -> str:
    """The whole document. Without the script all sections stand below each other."""
    names = section_names(sections)
    pairs = enumerate(zip(sections, names, strict=True))
    bodies = [tag("div", _section(s, i, name), data_view="model", data_name=name) for i, (s, name) in pairs]
    title = f"kvfold: {listed(names)}"
    head = join(
        [
            tag("meta", charset="utf-8"),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            tag("title", text(title)),
            tag("style", _asset("style.css")),
        ]
    )
    header = tag("header", tag("h1", text("KV cache compression: quality and cost")), buttons("model", names, names[0]))
    body = tag("body", tag("main", header, *bodies), tag("script", _asset("script.js")))
    return f"<!doctype html>\n{tag('html', tag('head', head), body, lang='en')}\n"


def section_names(sections: Sequence[Section]) -> list[str]:
    """The model, with what tells its sections apart."""
    models = [section.runs[0].model for section in sections]
    runs = [section.runs[0] for section in sections]
    longer = [f"{run.model}, seed {run.seed}, {run.haystack}, weights {run.weights[:8]}" for run in runs]
    return [name if models.count(name) == 1 else long for name, long in zip(models, longer, strict=True)]


def scopes_of(section: Section) -> list[Scope]:
    """All workloads first, then each where there are several."""
    each = [scope_of(name, (row for row in section.rows if row.workload == name)) for name in section.workloads]
    return [scope_of(OVERALL, section.rows), *each] if len(each) > 1 else each


def _section(section: Section, number: int, name: str) -> Html:
    scopes, style = scopes_of(section), styles(section.policies)
    parts = [
        tag("h2", text(name)),
        headline(section, scopes[0], style),
        _part("Quality against memory", _QUALITY, quality(scopes, style, f"scope-{number}")),
        _part("Score by depth and length", _HEAT, heat_maps(section, style, f"heat-{number}")),
        _part("Bytes and speed", _COSTS, cost_table(section, style)),
        _part("Fidelity", "", fidelity(section, style)),
        _part("Regressions", "", _lost(section, number)),
        _part("Failures", "", failures(section, style)),
        _part("Provenance", "", origin(section)),
    ]
    return join(parts)


def _part(title: str, told: str, content: Html) -> Html:
    """Nothing at all where there is nothing to show."""
    intro = tag("p", text(told)) if told else NOTHING
    return tag("section", tag("h3", text(title)), intro, content) if content else NOTHING


def _lost(section: Section, number: int) -> Html:
    found = regressions(section)
    if not found:
        return tag("p", text("No policy lost half a point or more on a sample that the full cache got right."))
    told = f"{counted(len(found), 'answer')} scored less than the full cache's by half a point or more."
    articles = tag("div", *map(article, shown(found)), class_="articles")
    data = embedded_json(f"regressions-{number}", embedded(found))
    return tag("div", tag("p", text(told)), articles, data, class_="lost", data_regressions=number)


def _asset(name: str) -> Html:
    return Html((files("kvfold.bench.report") / name).read_text(encoding="utf-8"))


_QUALITY = (
    "Score from 0 to 100 against resident bytes, as a share of a full bf16 cache's. Bands and small numbers are 95% "
    "intervals; in all workloads each counts the same. Lost and gained count samples that moved by half a point or "
    "more against the full cache; a difference in grey is not significant."
)
_HEAT = (
    "Mean score by depth of the answer in the prompt (down, 0% is the beginning) and by prompt length in tokens "
    "(across), for workloads with a depth."
)
_COSTS = (
    "Resident: bytes of the compressed prompt in memory; read per step: bytes of it that one decode step reads. One "
    "prefill serves all policies of a prompt, and a decode step all sequences of a batch: times compare runs, not "
    "single policies."
)
