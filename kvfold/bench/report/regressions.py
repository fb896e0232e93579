"""Regressions: samples that the full cache answered right and a policy wrong, with both answers.

The worst come first: the largest loss of score, then the most memory, since losing little with much memory is no
excuse. At most a few of each policy stand in the page itself, so that one bad policy does not fill it; a script browses
all that are embedded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.bench.record import PromptRow, Row
from kvfold.bench.report.cells import REGRESSION
from kvfold.bench.report.merge import FULL, Section, percent, sample_of

MOST_EMBEDDED = 400
MOST_SHOWN, MOST_OF_A_POLICY = 8, 2
_MOST_CHARACTERS = 600  # of an answer: enough to see what went wrong


@dataclass(frozen=True)
class Regression:
    """One row beside the full cache's answer to the same sample, as the page and its script show it."""

    policy: str
    memory: str
    mode: str
    sample: str
    full_score: float
    score: float
    facts: tuple[tuple[str, str], ...]  # asked, expected, and both answers
    prompt: str


def regressions(section: Section) -> list[Regression]:
    """All of them, worst first."""
    full = {(sample_of(row), row.mode): row for row in section.rows if row.policy == FULL and row.score is not None}
    found = []
    for row in section.rows:
        right = full.get((sample_of(row), row.mode))
        if right and right.score is not None and row.score is not None and right.score - row.score >= REGRESSION:
            found.append(_regression(right, row, section.prompts.get(sample_of(row))))
    return sorted(found, key=lambda each: (each.score - each.full_score, -percent(each.memory)))


def _regression(right: Row, row: Row, prompt: PromptRow | None) -> Regression:
    asked, expected = (prompt.question, " | ".join(prompt.answers)) if prompt else ("", "")
    facts = [("asked", asked), ("expected", expected)]
    facts += [("full cache", _cut(right.answer)), (row.resolved, _cut(row.answer))]
    return Regression(
        row.policy,
        row.memory,
        row.mode,
        sample=f"{row.workload}, {row.task}, {row.length:,} tokens, sample {row.index}",
        full_score=right.score or 0.0,
        score=row.score or 0.0,
        facts=tuple((name, said.strip() or "(nothing)") for name, said in facts),
        prompt=f"{prompt.begin} […] {prompt.end}" if prompt else "",
    )


def _cut(answer: str) -> str:
    return answer if len(answer) <= _MOST_CHARACTERS else f"{answer[:_MOST_CHARACTERS]} …"


def embedded(found: Sequence[Regression]) -> list[Regression]:
    """For the script; worst first, as many as a page should carry, and of every policy its share."""
    return _spread(found, max(1, MOST_EMBEDDED // max(1, len({each.policy for each in found}))))


def shown(found: Sequence[Regression]) -> list[Regression]:
    return _spread(found, MOST_OF_A_POLICY)[:MOST_SHOWN]


def _spread(found: Sequence[Regression], most_of_a_policy: int) -> list[Regression]:
    taken: Counter[str] = Counter()
    spread = []
    for each in found:
        taken[each.policy] += 1
        if taken[each.policy] <= most_of_a_policy:
            spread.append(each)
    return spread
