"""Regressions: samples that the full cache answered right and a policy wrong, with both answers.

The worst come first: the largest loss of score, then the most memory, since losing little with much memory is no
excuse. At most a few of each policy stand in the page itself, so that one bad policy does not fill it; a script browses
all that are embedded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvfold.bench.record import PromptRow, Row
from kvfold.bench.report.comparison import REGRESSION
from kvfold.bench.report.html import Html, join, tag, text
from kvfold.bench.report.merge import FULL, Section, percent, sample_of

MOST_EMBEDDED = 400
MOST_SHOWN, MOST_OF_A_POLICY = 8, 2
_MOST_CHARACTERS = 600  # of an answer: enough to see what went wrong


@dataclass(frozen=True)
class Regression:
    """One row beside the full cache's answer to the same sample."""

    policy: str
    memory: str
    mode: str
    resolved: str
    sample: str
    full_score: float
    score: float
    question: str
    expected: tuple[str, ...]
    begin: str
    end: str
    full_answer: str
    answer: str

    @property
    def loss(self) -> float:
        return self.full_score - self.score


def regressions(section: Section) -> list[Regression]:
    """All of them, worst first."""
    full = {(sample_of(row), row.mode): row for row in section.rows if row.policy == FULL and row.score is not None}
    found = []
    for row in section.rows:
        right = full.get((sample_of(row), row.mode))
        if right and right.score is not None and row.score is not None and right.score - row.score >= REGRESSION:
            found.append(_regression(right, row, section.prompts.get(sample_of(row))))
    return sorted(found, key=lambda each: (-each.loss, -percent(each.memory)))


def _regression(right: Row, row: Row, prompt: PromptRow | None) -> Regression:
    return Regression(
        row.policy,
        row.memory,
        row.mode,
        row.resolved,
        sample=f"{row.workload}, {row.task}, {row.length:,} tokens, sample {row.index}",
        full_score=right.score or 0.0,
        score=row.score or 0.0,
        question=prompt.question.strip() if prompt else "",
        expected=prompt.answers if prompt else (),
        begin=prompt.begin if prompt else "",
        end=prompt.end if prompt else "",
        full_answer=_cut(right.answer),
        answer=_cut(row.answer),
    )


def _cut(answer: str) -> str:
    return answer if len(answer) <= _MOST_CHARACTERS else f"{answer[:_MOST_CHARACTERS]} …"


def embedded(found: Sequence[Regression]) -> list[dict[str, Any]]:
    """For the script; worst first, as many as a page should carry, and of every policy its share."""
    most = max(1, MOST_EMBEDDED // max(1, len({each.policy for each in found})))
    return [asdict(each) for each in _spread(found, most)]


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


def article(each: Regression) -> Html:
    """One sample. The script builds the same from JSON."""
    scores = f"{100 * each.full_score:.0f} → {100 * each.score:.0f}"
    head = tag("h4", tag("code", text(each.policy)), text(f" in {each.memory}, question {each.mode}: {scores}"))
    facts = [("asked", each.question), ("expected", " | ".join(each.expected))]
    facts += [("full cache", each.full_answer), (each.resolved, each.answer)]
    pairs = (join([tag("dt", text(name)), tag("dd", text(said.strip() or "(nothing)"))]) for name, said in facts)
    context = tag("details", tag("summary", text("the prompt")), tag("p", text(f"{each.begin} […] {each.end}")))
    return tag("article", head, tag("p", text(each.sample), class_="note"), tag("dl", *pairs), context)
