"""Accuracy, tokens and latency of systems over one log: with a model, or by the first sentence that they show."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvfold.memory.evaluation.judge import extracted, holds, is_right
from kvfold.memory.evaluation.log import KINDS, Kind, Log, Question
from kvfold.memory.evaluation.systems import System

Count = Callable[[str], int]  # tokens of a text
Answer = Callable[[System, Question], str]  # a model's


@dataclass(frozen=True)
class Result:
    """Of one system. `accuracy` None: it shows all sentences, and without a model none of them is the answer."""

    system: str
    num_questions: int
    accuracy: float | None
    by_kind: dict[Kind, float]
    recalled: (
        float | None
    )  # share of the questions that have an answer where it is shown, outdated ones beside it or not
    tokens: float  # of the context, on average
    ms: float  # to find the context; with a model to answer, too; the median


def evaluate(log: Log, systems: Sequence[System], count: Count, answer: Answer | None = None) -> Iterator[Result]:
    """The result of each system in turn."""
    for system in systems:
        rights: dict[Kind, list[bool]] = {kind: [] for kind in KINDS}
        tokens, times = [], []
        for question in log.questions:
            began = time.perf_counter()
            said = extracted(system.texts(question)) if answer is None else answer(system, question)
            times.append(1e3 * (time.perf_counter() - began))
            rights[question.kind].append(is_right(question, said))
            tokens.append(count(system.context(question)))
        all_rights = [right for of_kind in rights.values() for right in of_kind]
        has_answer = answer is not None or system.is_ranked
        yield Result(
            system.name,
            len(all_rights),
            statistics.fmean(all_rights) if has_answer else None,
            {kind: statistics.fmean(found) for kind, found in rights.items() if found} if has_answer else {},
            _recalled(log, system),
            statistics.fmean(tokens),
            statistics.median(times),
        )


def _recalled(log: Log, system: System) -> float | None:
    asked = [question for question in log.questions if question.answer is not None]
    found = [any(holds(text, str(one.answer)) for text in system.texts(one)) for one in asked]
    return statistics.fmean(found) if found else None
