"""Questions in an endless stream of lines: every ten lines one, whose answer stands twenty lines back.

StreamEval of StreamingLLM (arXiv:2309.17453), over lines in the manner of LongEval. An answer is never further back
than twenty lines, so sinks and a window of recent tokens are enough, however long the stream; a policy that keeps only
what mattered at the beginning fails. A sample is joined in the middle of the stream, at any word, and ends after a line
whose number is a multiple of ten; earlier questions stand in it with their right answers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

from kvfold.bench.workloads.base import Sample, Setting, Workload, workload
from kvfold.bench.workloads.fill import Supply, fit

_EVERY = 10  # lines between questions
_LAG = 20  # lines from an answer to its question
_LARGEST = 50_000
_LAST_LINES = range(10_000, 90_000, _EVERY)
_NEW_TOKENS = 16
_INTRODUCTION = (
    "Below is a stream of lines, each with a number in a register. Now and then a question asks for the register of an "
    "earlier line.\n\n"
)


@workload
@dataclass(frozen=True)
class Stream(Workload):
    name: ClassVar[str] = "stream"
    summary: ClassVar[str] = "questions in an endless stream, each about a line shortly before"
    source: ClassVar[str] = "StreamEval of StreamingLLM (arXiv:2309.17453)"
    metric: ClassVar[str] = "1 if the first number of the reply is the register asked for"
    differences: ClassVar[str] = (
        "each question is a prompt of its own, in a stream joined in its middle; earlier questions are answered rightly"
    )
    tasks: ClassVar[tuple[str, ...]] = ("lines",)

    def build(self, setting: Setting, task: str, index: int, random: Random) -> Sample:
        last = random.choice(_LAST_LINES)
        salt = random.random()
        asked = last - _LAG
        words = Supply(_backwards(last, salt))
        facts = {"lag": _LAG, "last_line": last}
        answers = (str(_register(asked, salt)),)

        def make(count: int) -> Sample:
            context = _INTRODUCTION + "".join(words.take(count)[::-1])
            question, begun, start = _question(asked), _reply_prefix(asked), len(_INTRODUCTION)
            return Sample(task, index, context, question, answers, _NEW_TOKENS, begun, facts, start)

        return fit(setting, make, least=len(list(_backwards(last, salt, first=asked))))

    def score(self, sample: Sample, reply: str) -> float:
        return float(re.findall(r"\d+", reply)[:1] == [sample.answers[0]])


def _backwards(last: int, salt: float, *, first: int = 0) -> Iterator[str]:
    """The words of the stream with the space after them, from the end of line `last` back to line `first`."""
    for line in range(last, first - 1, -1):
        text = f"line {line}: register <{_register(line, salt)}>\n"
        if line % _EVERY == 0 and line != last:
            asked = line - _LAG
            text += f"{_question(asked)}\n{_reply_prefix(asked)}{_register(asked, salt)}>\n"
        yield from re.findall(r"\S+\s", text)[::-1]


def _question(asked: int) -> str:
    return f"Question: what is the register of line {asked}?"


def _reply_prefix(asked: int) -> str:
    return f"The register of line {asked} is <"


def _register(line: int, salt: float) -> int:
    """A function of the line alone: the stream is written from its end backwards."""
    return Random(f"{salt}/{line}").randint(1, _LARGEST)
