"""The headline of the report: what was run, and the best policy at each budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvfold.bench.record import MODES, Mode
from kvfold.bench.report.cells import Scope, estimate, weighted
from kvfold.bench.report.comparison import Comparison, comparisons
from kvfold.bench.report.html import Html, join, table, tag, text
from kvfold.bench.report.merge import FULL, Section, percent, sample_of
from kvfold.bench.report.policy_style import PolicyStyle
from kvfold.bench.report.text import counted, difference_text, listed, named, score_text


def headline(section: Section, overall: Scope, styles: Mapping[str, PolicyStyle]) -> Html:
    """Two sentences, and who won at each memory."""
    lead = tag("p", text(f"{_asked(section)} {_scored(overall)}"), class_="lead")
    note = tag("p", text(_MODES_TOLD), class_="note")
    return join([lead, winners(overall, styles), note])


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
    told = [_full_told(overall, mode) for mode in MODES if overall.full(mode)]
    if not told:
        return "The full cache was not run, so nothing here says what compression costs."
    return f"With the full cache it scored {listed(told)} out of 100."


def _full_told(overall: Scope, mode: Mode) -> str:
    full = overall.full(mode)
    assert full is not None
    score = estimate(weighted(full.scores, overall.common([full])))
    return f"{100 * score.mean:.1f} (question {mode})"


def winners(overall: Scope, styles: Mapping[str, PolicyStyle]) -> Html:
    """The best policy in each memory, question known and unknown."""
    found = [comparison for mode in MODES if mode in overall.samples for comparison in comparisons(overall, mode)]
    found.sort(key=lambda comparison: -percent(comparison.memory))
    lines = [_winner(comparison, styles) for comparison in found if comparison.entries]
    headings = ("memory", "question", "best policy", "score", "against full", "not told apart from it")
    return table(headings, lines, words=3, class_="winners") if lines else tag("p", text(_NOBODY))


def _winner(comparison: Comparison, styles: Mapping[str, PolicyStyle]) -> list[Html]:
    best = comparison.entries[0]
    difference = difference_text(best.beside.difference) if best.beside else text("–")
    words = [text(comparison.memory), text(comparison.mode), named(best.cell.policy, styles)]
    return [*words, score_text(best.score), difference, text(_tied(best.tied))]


def _tied(policies: Sequence[str]) -> str:
    """The first two by name: on a phone a longer list would push the numbers out of sight."""
    more = [f"{len(policies) - _MOST_NAMED} more"] if len(policies) > _MOST_NAMED else []
    return listed([*policies[:_MOST_NAMED], *more]) or "–"


_MOST_NAMED = 2
_MODES_TOLD = (
    "Known (question-aware): the question was part of the compressed prompt. Unknown (question-agnostic): the context "
    "was compressed without it."
)
_NOBODY = "No policy ran on all samples of the full cache, so none is called best."
