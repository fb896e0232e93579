"""What is compared: a memory, BM25 over the log, the whole log, and nothing. Each shows texts for a question."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from kvfold.memory.dates import day_text
from kvfold.memory.evaluation.log import Log, Question
from kvfold.memory.extract import fact_spans
from kvfold.memory.memory import Memory
from kvfold.memory.recall import NUM_RECALLED
from kvfold.memory.render import render
from kvfold.shortening.bm25 import bm25
from kvfold.shortening.word_index import WordIndex


class System(Protocol):
    """A way to answer from a log."""

    name: str
    is_ranked: bool  # whether the first text is the answer that it would give

    def texts(self, question: Question) -> list[str]:
        """Sentences for a question, best first."""

    def context(self, question: Question) -> str:
        """What a model reads before the question."""


class MemorySystem:
    """Facts of a memory, written turn by turn; a question of the past names its day, as `--at` does."""

    name = "memory"
    is_ranked = True

    def __init__(self, log: Log, path: Path, embedder: str = "auto") -> None:
        self.memory, self._now = Memory(path, "user", embedder=embedder), log.now
        for number, turn in enumerate(log.turns):
            self.memory.add(turn.text, source=f"turn-{number}", at=turn.at)

    @classmethod
    def of(cls, memory: Memory, now: float) -> MemorySystem:
        """Of a memory that is there."""
        system = object.__new__(cls)
        system.memory, system._now = memory, now
        return system

    def texts(self, question: Question) -> list[str]:
        return [one.fact.text for one in self.memory.recall(question.text, at=question.at or self._now)]

    def context(self, question: Question) -> str:
        return render(one.fact for one in self.memory.recall(question.text, at=question.at or self._now))

    def close(self) -> None:
        self.memory.close()


class Bm25System:
    """The sentences of the log that BM25 ranks first."""

    name = "bm25"
    is_ranked = True

    def __init__(self, log: Log) -> None:
        found = [(turn.at, turn.text[span.start : span.end]) for turn in log.turns for span in fact_spans(turn.text)]
        self._sentences = [text for _, text in found]
        self._lines = [f"- {day_text(at)}: {text}" for at, text in found]
        self._index = WordIndex.of(self._sentences)

    def texts(self, question: Question) -> list[str]:
        return [self._sentences[row] for row in self._best(question)]

    def context(self, question: Question) -> str:
        return "\n".join(self._lines[row] for row in sorted(self._best(question)))

    def _best(self, question: Question) -> Sequence[int]:
        score_N = bm25(self._index, question.text)
        best = np.argsort(-score_N, kind="stable")[:NUM_RECALLED]
        return [int(row) for row in best if score_N[row] > 0]


class FullSystem:
    """The whole log."""

    name = "full"
    is_ranked = False

    def __init__(self, log: Log) -> None:
        self._text = log.text
        self._sentences = [turn.text for turn in log.turns]

    def texts(self, question: Question) -> list[str]:
        return self._sentences

    def context(self, question: Question) -> str:
        return self._text


class NothingSystem:
    """No context."""

    name = "nothing"
    is_ranked = True

    def texts(self, question: Question) -> list[str]:
        return []

    def context(self, question: Question) -> str:
        return ""
