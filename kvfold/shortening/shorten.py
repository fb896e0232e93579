"""`shorten(graph, 4x)`: less text before the cache begins, and what was kept of it.

    shortened = shorten_text(text, Shorten(Graph(), Ratio(4)), tokenizer=tokenizer)
    print(shortened.text, shortened.num_tokens, "of", shortened.num_original_tokens)

Extractive selectors keep spans of the text in their order, so the result is a subsequence of the input.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvfold.errors import InputError, PolicyError, SizeError
from kvfold.policy.registry import Term, register, term_of
from kvfold.policy.size import Percent, Ratio, Size, Tokens, exact
from kvfold.shortening.base import Bools, Chunker, LanguageModel, Progress, Selector, Task, Unit
from kvfold.shortening.chunkers.auto import Auto
from kvfold.shortening.embedders.choice import NAMES as EMBEDDERS
from kvfold.shortening.embedders.choice import load_embedder
from kvfold.shortening.greedy import choose
from kvfold.shortening.parts import ends_paragraph, parts_of
from kvfold.shortening.protected import kinds_of, protected_parts
from kvfold.shortening.tokens import TokenOffsets

_AUTO = Auto()
END_TOKENS = 128


@register("shorten", "shorten", revision=3, cost="before prefill")
@dataclass(frozen=True)
class Shorten(Term):
    """Text is shortened before it is read: `by` says which parts stay, `to` how many tokens.

    `keep` names what always stays (numbers, ids, quotes, urls, negations, code, headings, all, none), `units` how the
    text is parted, `embedder` whose vectors compare the parts. Texts below `least` tokens stay as they are.
    """

    by: Selector
    to: Size | Percent
    keep: str = "headings, ids, urls"
    units: Chunker = _AUTO
    embedder: str = "auto"
    least: int = 256

    def validate(self) -> str | None:
        if not isinstance(self.to, Ratio | Tokens | Percent):
            return f"to is 4x, 25% or 2000tok, not {self.to}: text is counted in tokens"
        if isinstance(self.to, Percent) and not 0 < self.to.percent <= 100:
            return f"to is above 0% and at most 100%, not {self.to}"
        if self.embedder not in EMBEDDERS and "/" not in self.embedder:
            known = f"{', '.join(EMBEDDERS)}, or a folder of sentence-transformers"
            return f'no embedder "{self.embedder}"; embedders: {known}'
        try:
            kinds_of(self.keep)
        except PolicyError as error:
            return str(error)
        return None

    @property
    def identity(self) -> str:
        """The embedder by its content, so that results of different vectors have different fingerprints."""
        found = load_embedder(self.embedder)
        return repr(replace(self, embedder=f"{found.name}@{found.digest}"))

    def chunker(self, target: int) -> Chunker:
        """What parts a text of which so many tokens may stay."""
        return self.units.suiting(self.by, target) if isinstance(self.units, Auto) else self.units

    def target(self, num_tokens: int) -> int:
        """Tokens that may stay of so many."""
        if isinstance(self.to, Tokens):
            return self.to.count
        share = self.to.share if isinstance(self.to, Percent) else 1 / exact(self._times)
        return math.ceil(share * num_tokens)

    @property
    def _times(self) -> float:
        assert isinstance(self.to, Ratio)
        return self.to.times


@dataclass(frozen=True)
class Shortened:
    """A shortened text: what is left, where it stood, and how many tokens it had and has."""

    text: str
    spans: tuple[tuple[int, int], ...]  # of the original; empty where the selector writes in its own words
    original: str = field(repr=False)
    num_tokens: int
    num_original_tokens: int
    seconds: float = 0.0
    is_extractive: bool = True

    @classmethod
    def whole(cls, text: str, num_tokens: int) -> Shortened:
        """A text of which nothing goes."""
        return cls(text, ((0, len(text)),) if text else (), text, num_tokens, num_tokens)

    @property
    def ratio(self) -> float:
        return self.num_original_tokens / max(1, self.num_tokens)


def shorten_text(
    text: str,
    plan: Shorten,
    *,
    question: str | None = None,
    tokenizer: Any = None,
    model: LanguageModel | None = None,
    keeps_ends: bool = False,
    may_stay: bool = False,
    progress: Progress | None = None,
) -> Shortened:
    """The text cut to the size of `plan`. Tokens are those of `tokenizer`, or words and marks without one.

    `keeps_ends`: the first unit and the end of the last paragraph stay, as instructions and questions of a message.
    White space alone has no parts and comes back as it is. SizeError where the size is below what must stay or below
    the smallest unit; with `may_stay`, as in a policy, a text stays whole that a size of `4x` or `25%` cannot cut.
    """
    began = time.perf_counter()
    tokens = TokenOffsets.of(text, tokenizer)
    target = plan.target(len(tokens))
    if len(tokens) <= max(target, plan.least) or not text.strip():
        return Shortened.whole(text, len(tokens))
    name = term_of(plan.by).name
    if plan.by.needs_question and not (question and question.strip()):
        raise InputError(f"{name} keeps what a question asks for; give the question, or use graph, which needs none")
    if plan.by.needs_model and model is None:
        raise InputError(f"this {name} asks a model; give one, or use graph or plain rank, which need none")
    embedder = load_embedder(plan.embedder)
    parts = parts_of(text)
    chunker = plan.chunker(target)
    units = chunker.units(text, parts, embedder, tokens)
    keep = kinds_of(plan.keep)
    kept_n = protected_parts(text, parts, keep)
    ends_n = np.zeros(len(parts), dtype=bool)
    if keeps_ends:
        ends_n = end_parts(text, parts, tokens, min(END_TOKENS, target // 2))
    kept_n |= ends_n
    task = Task(text, units, parts, kept_n, tokens, target, question, embedder, keep, model, progress, chunker, ends_n)
    try:
        spans, left = _left(task, plan.by)
    except SizeError:
        if not may_stay or isinstance(plan.to, Tokens):
            raise
        return Shortened.whole(text, len(tokens))
    is_cut = plan.by.is_extractive
    num_left = sum(tokens.count(*span) for span in spans) if is_cut else len(TokenOffsets.of(left, tokenizer))
    seconds = time.perf_counter() - began
    return Shortened(left, spans, text, num_left, len(tokens), seconds, is_cut)


def _left(task: Task, selector: Selector) -> tuple[tuple[tuple[int, int], ...], str]:
    """What stays: the selector's own spans, or units by their worth; or no spans but its own words."""
    if not selector.is_extractive:
        return (), selector.rewrite(task)
    spans = selector.spans(task)
    spans = tuple(_with_single_breaks(task.text, choose(task, selector) if spans is None else spans))
    return spans, "".join(task.text[start:end] for start, end in spans)


def _with_single_breaks(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Without line breaks at the beginning of what stays, and behind a gap where the text before it ends a line."""
    ends_line = True
    for low, high in spans:
        if low and ends_line:
            space = len(text[low:high]) - len(text[low:high].lstrip())
            low += text[low : low + space].rfind("\n") + 1
        if low < high:
            ends_line = text[high - 1] == "\n"
            yield low, high


def end_parts(text: str, parts: tuple[Unit, ...], tokens: TokenOffsets, most: int = END_TOKENS) -> Bools:
    """[n]: the first part and the last, and others before it within the last paragraph and `most` tokens."""
    kept_n = np.zeros(len(parts), dtype=bool)
    kept_n[:1] = kept_n[-1:] = True
    for number in range(len(parts) - 2, -1, -1):
        if ends_paragraph(text, parts[number]) or tokens.count(parts[number].start, len(text)) > most:
            break
        kept_n[number] = True
    return kept_n


def end_text(text: str) -> str:
    """The end of the last paragraph of a message, where its question stands."""
    parts, tokens = parts_of(text), TokenOffsets.of(text)
    kept_n = end_parts(text, parts, tokens)
    kept_n[:1] = kept_n.all()
    return "".join(text[part.start : part.end] for part, kept in zip(parts, kept_n, strict=True) if kept)
