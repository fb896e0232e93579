"""What shortening works on: units of a text, their tokens, and the contract of selectors and chunkers.

A text is parted into units that cover it without gaps: a unit ends where the next begins, with the white space behind
it. A selector keeps some of them; what it returns is joined in the order of the text.

    N units   n parts   D dimensions
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvfold.policy.registry import Term
from kvfold.shortening.tokens import TokenOffsets
from kvfold.shortening.word_index import WordIndex

Kind = Literal["sentence", "heading", "code", "item", "row", "chunk", "word"]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Progress = Callable[[int, int], None]


class Unit(NamedTuple):
    """Characters `start` to `end` of a text, and what they are."""

    start: int
    end: int
    kind: Kind


class Embedder(Protocol):
    """Vectors of texts. `name` tells which vectors they are, `digest` their content."""

    name: str
    digest: str

    def codes(self, texts: Sequence[str], progress: Progress | None = None) -> NDArray[np.int8]:
        """[N, D]: unit vectors times 127, rounded, so that products of two are exact in fp32 and alike on every
        machine; 0 for a text without known words. An encoder that takes seconds reports texts done of all."""


class LanguageModel(Protocol):
    """What a loaded model tells about a text."""

    def windows(self, text: str) -> list[tuple[int, int]]:
        """Spans of the text, each of which fits the trained context with a question behind it; they overlap and
        together cover the text."""

    def losses(self, text: str, progress: Progress | None = None) -> tuple[NDArray[np.int64], Floats]:
        """First character of every token and its loss -log p(token | text before it)."""

    def yes_probabilities(self, text: str, prompts: Sequence[str], progress: Progress | None = None) -> Floats:
        """p(yes) / (p(yes) + p(no)) behind each prompt, which follows the text."""

    def attention(self, text: str, question: str, progress: Progress | None = None) -> tuple[NDArray[np.int64], Floats]:
        """First character of every token of the text, and how much the question attends to it."""

    def complete(self, prompt: str, max_new_tokens: int) -> str:
        """The greedy reply to a prompt."""


@dataclass(frozen=True)
class Task:
    """One text to shorten: what there is, how much may stay, and what must."""

    text: str
    units: tuple[Unit, ...]
    parts: tuple[Unit, ...]  # sentences and the like, which units are made of
    kept_n: Bools  # parts that always stay
    tokens: TokenOffsets
    target: int  # tokens that may stay
    question: str | None
    embedder: Embedder
    keep: tuple[str, ...] = ()  # kinds of protected.py that always stay
    model: LanguageModel | None = None
    progress: Progress | None = None
    chunker: Chunker | None = None
    ends_n: Bools | None = None  # parts at both ends of a message that stay word for word

    def text_of(self, unit: Unit) -> str:
        return self.text[unit.start : unit.end]

    def texts(self) -> list[str]:
        return [self.text_of(unit) for unit in self.units]

    @cached_property
    def codes_ND(self) -> NDArray[np.int8]:
        """Vectors of all units."""
        if self.chunker is None:
            return self.embedder.codes(self.texts(), self.progress)
        return self.chunker.codes(self)

    @cached_property
    def num_tokens_N(self) -> NDArray[np.int64]:
        """Tokens that begin in each unit."""
        bounds = np.array([(unit.start, unit.end) for unit in self.units], dtype=np.int64).reshape(-1, 2)
        found: NDArray[np.int64] = np.diff(np.searchsorted(self.tokens.starts, bounds))[:, 0]
        return found

    @cached_property
    def words(self) -> WordIndex:
        """Words of all units."""
        return WordIndex.of(self.texts())


class Selector(Term):
    """A choice of the `selector` axis: which units of a text stay. A variant gives every unit its worth."""

    needs_question: ClassVar[bool] = False
    is_extractive: ClassVar[bool] = True
    avoids_repeats: ClassVar[bool] = False  # a unit is worth less for others that say the same, and nothing for twins
    skips: ClassVar[bool] = True  # a unit that does not fit makes room for others

    @property
    def takes_passages(self) -> bool:
        """Whether passages suit it better than sentences."""
        return False

    @property
    def needs_model(self) -> bool:
        """Whether it asks the loaded model."""
        return False

    def worth(self, task: Task) -> Floats:
        """[N]: units of higher worth stay first."""
        raise NotImplementedError

    def spans(self, task: Task) -> tuple[tuple[int, int], ...] | None:
        """What stays, for a selector that cuts finer than units; None: units by their worth."""
        return None

    def rewrite(self, task: Task) -> str:
        """The text in other words, for a selector that is not extractive."""
        raise NotImplementedError


class Chunker(Term):
    """A choice of the `units` axis: how a text is parted."""

    def units(self, text: str, parts: tuple[Unit, ...], embedder: Embedder, tokens: TokenOffsets) -> tuple[Unit, ...]:
        """Units in the order of the text, made of its parts; together they cover it."""
        raise NotImplementedError

    def codes(self, task: Task) -> NDArray[np.int8]:
        """[N, D]: vectors of its units."""
        return task.embedder.codes(task.texts(), task.progress)
