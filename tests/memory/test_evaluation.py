"""The made-up log: facts stand where questions expect them, and right answers are told from wrong ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvfold.errors import InputError
from kvfold.memory.dates import day_text
from kvfold.memory.evaluation.answers import ModelAnswers
from kvfold.memory.evaluation.judge import extracted, holds, is_right
from kvfold.memory.evaluation.log import KINDS, Log, Question, make_log
from kvfold.memory.evaluation.own_questions import read_questions
from kvfold.memory.evaluation.run import Result, evaluate
from kvfold.memory.evaluation.systems import Bm25System, FullSystem, MemorySystem, NothingSystem, System
from kvfold.memory.question import asked_for
from kvfold.models.loader import Model


@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize("seed", [0, 7])
def test_a_log_says_what_its_questions_ask_for(seed: int, is_free: bool) -> None:
    log = make_log(40, 10, 40, seed=seed, is_free=is_free)
    assert log == make_log(40, 10, 40, seed=seed, is_free=is_free) != make_log(40, 10, 40, seed=seed + 1)
    assert {question.kind for question in log.questions} == set(KINDS)
    assert [turn.at for turn in log.turns] == sorted(turn.at for turn in log.turns) and log.turns[-1].at < log.now
    for question in log.questions:
        assert (question.answer is None) == (question.kind in ("ended", "unknown"))
        assert (question.at is None) == (question.kind != "past")
        if question.answer is not None:
            assert holds(log.text, question.answer)
            assert question.answer not in question.others
        if question.at is not None:
            assert day_text(question.at) in question.text
            asked = asked_for(question.text)
            assert asked.day is not None and question.at <= asked.day < question.at + 86_400


@pytest.mark.parametrize(("facts", "sessions", "questions"), [(4, 10, 10), (92, 10, 10), (40, 3, 10), (40, 10, 0)])
def test_a_log_that_cannot_be_is_refused(facts: int, sessions: int, questions: int) -> None:
    with pytest.raises(InputError, match="a log has 5 to 91 facts"):
        make_log(facts, sessions, questions)


@pytest.mark.parametrize(
    ("answer", "is_it"),
    [
        ("Anna lives in Paris.", True),
        ("paris", True),
        ("Parisian", False),
        ("not Berlin but Paris", False),
        ("unknown", False),
        ("", False),
    ],
)
def test_an_answer_has_the_value_and_no_other(answer: str, is_it: bool) -> None:
    assert is_right(Question("?", "current", "Paris", ("Berlin", "Oslo")), answer) is is_it


def test_where_nothing_answers_no_value_is_right() -> None:
    question = Question("?", "unknown", None, ("Berlin", "555-12"))
    assert is_right(question, "I do not know.") and is_right(question, "Not 555-123.")
    assert not is_right(question, "New York") and is_right(question, " ")
    assert not is_right(question, "Perhaps Berlin.") and not is_right(question, "555-12")
    assert extracted(["Anna no longer lives in Berlin.", "b"]) == "" == extracted([])
    assert extracted(["Anna lives in Berlin.", "b"]) == "Anna lives in Berlin."


def _words(text: str) -> int:
    return len(re.findall(r"\w+", text))


def evaluated(log: Log, path: Path) -> dict[str, Result]:
    memory = MemorySystem(log, path, "hashed")
    systems: list[System] = [memory, Bm25System(log), FullSystem(log), NothingSystem()]
    found = {result.system: result for result in evaluate(log, systems, _words)}
    memory.close()
    return found


def test_memory_beats_bm25_on_updates_ends_and_unknowns(path: Path) -> None:
    """Over the log that the docs show; nothing is right exactly where there is no answer."""
    found = evaluated(make_log(), path)
    memory, bm25, full, nothing = (found[name] for name in ("memory", "bm25", "full", "nothing"))
    assert memory.accuracy is not None and bm25.accuracy is not None and memory.accuracy > bm25.accuracy + 0.3
    assert all(memory.by_kind[kind] > bm25.by_kind[kind] for kind in ("updated", "ended", "unknown"))
    assert nothing.by_kind == {kind: float(kind in ("ended", "unknown")) for kind in KINDS} and nothing.tokens == 0
    assert full.accuracy is None and full.recalled == 1.0 and full.tokens > 10 * memory.tokens


def test_a_model_answers_from_what_is_shown(model: Model, path: Path) -> None:
    """A random model answers nothing right but what needs no answer; a shared context is read once."""
    log = make_log(6, 4, 5)
    with ModelAnswers(model, "streaming + 128tok + int8") as answers:
        found = list(evaluate(log, [FullSystem(log), NothingSystem()], _words, answers))
    assert [result.num_questions for result in found] == [5, 5]
    assert all(result.accuracy is not None for result in found)


def test_own_questions_are_read() -> None:
    lines = '{"question": "Where?", "answer": "Paris"}\n\n{"question": "Where?", "answer": null, "at": "2026-02-01"}'
    first, second = read_questions(lines)
    assert (first.kind, second.kind, second.at is None) == ("current", "unknown", False)
    for bad in ("", "[]", "{}", '{"question": 1, "answer": "a"}', '{"question": "a", "answer": "b", "at": "May"}', "["):
        with pytest.raises(InputError):
            read_questions(bad)
