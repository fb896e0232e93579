"""Needles in a haystack: prompts with numbers hidden in filler text, and the score of an answer.

The three tasks and their wording follow RULER (arXiv:2404.06654), as does the score: the share of expected numbers that
occur in the answer. Needle depths are drawn without replacement from forty even steps through the document.

    single      one key with one number
    multikey    four keys with one number each; one key is asked for
    multivalue  one key with four numbers; all are asked for

A prompt is two runs of tokens, `document_ids` then `question_ids`, the same whether a policy compresses both (the
question is known) or the document alone (it is not).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from random import Random
from typing import Any, Literal

from kvfold.bench.haystack import Haystack, prose
from kvfold.errors import InputError
from kvfold.models.template import ChatTemplate

Task = Literal["single", "multikey", "multivalue"]
TASKS: tuple[Task, ...] = ("single", "multikey", "multivalue")
NUM_KEYS: dict[Task, int] = {"single": 1, "multikey": 4, "multivalue": 1}
NUM_VALUES: dict[Task, int] = {"single": 1, "multikey": 1, "multivalue": 4}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_DEPTHS = tuple((step + 0.5) / 40 for step in range(40))
_SPARE_TOKENS = 4  # an answer may begin with a colon or a quotation mark
_FIRST = _words(
    "amber brisk calm dapper eager fabled gentle hidden ivory jolly keen lively mellow nimble opal proud quick rustic "
    "silver tidy urban velvet wistful young zesty brave clever dusty elegant frosty"
)
_SECOND = _words(
    "anchor badger canyon dolphin engine falcon garden hammer island jacket kettle lantern meadow needle orchid pepper "
    "quarry ribbon saddle teapot umbrella violin walnut yarrow zipper bridge comet drawer ember fiddle"
)


@dataclass(frozen=True)
class Needle:
    """One sentence to hide, at a depth from 0 (start of the document) to 1 (its end)."""

    key: str
    value: str
    depth: float

    @property
    def sentence(self) -> str:
        return f"One of the special magic numbers for {self.key} is: {self.value}."


@dataclass(frozen=True)
class Prompt:
    index: int
    task: Task
    expected: tuple[str, ...]
    document: str
    document_ids: list[int]
    question_ids: list[int]
    max_new_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.document_ids) + len(self.question_ids)


@dataclass(frozen=True)
class Needles:
    """The workload: prompt i is a function of seed, i, length, haystack and tokenizer alone."""

    tokenizer: Any
    num_tokens: int  # of document and question together, at most; at least this less one sentence
    seed: int = 0
    haystack: Haystack = prose

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return ChatTemplate.of(self.tokenizer)

    def prompt(self, index: int) -> Prompt:
        """Tasks take turns, so any number of prompts is balanced."""
        random = Random(f"{self.seed}/{index}")
        task = TASKS[index % len(TASKS)]
        needles = _draw(task, random)
        asked = [needle for needle in needles if needle.key == needles[0].key]
        expected = tuple(needle.value for needle in asked)
        before, after = _frame(self._template, asked[0].key, many=len(asked) > 1)
        question_ids = self._encode(after)
        document = self._document(before, needles, self.num_tokens - len(question_ids), random)
        budget = len(self._encode(_long_answer(expected))) + _SPARE_TOKENS
        return Prompt(index, task, expected, document, self._read(document), question_ids, budget)

    def _document(self, before: str, needles: Sequence[Needle], num_tokens: int, random: Random) -> str:
        """As many sentences around the needles as fit."""
        source, sentences, filled = self.haystack(random), list[str](), 0
        while filled <= num_tokens:
            sentences += islice(source, 32)
            filled = len(self._encode(" ".join(sentences)))

        def document(count: int) -> str:
            return before + " ".join(hide(needles, sentences[:count]))

        fits = bisect_right(range(len(sentences)), num_tokens, key=lambda count: len(self._read(document(count))))
        if fits <= 1:  # not even the needles and one sentence
            least = self.num_tokens - num_tokens + len(self._read(document(1)))
            raise InputError(f"prompts of {self.num_tokens} tokens are too short; give at least {least}")
        return document(fits - 1)

    def _read(self, document: str) -> list[int]:
        """A chat template writes its own first token; plain text gets the tokenizer's."""
        return self._encode(document, special=self._template is None)

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return found


def hide(needles: Sequence[Needle], sentences: Sequence[str]) -> list[str]:
    """The sentences with each needle before the one at its depth."""
    found = list(sentences)
    for needle in sorted(needles, key=lambda needle: needle.depth, reverse=True):
        found.insert(round(needle.depth * len(sentences)), needle.sentence)
    return found


def score(answer: str, expected: Sequence[str]) -> float:
    """The share of expected numbers that occur in the answer."""
    return sum(value in answer for value in expected) / len(expected)


def _draw(task: Task, random: Random) -> list[Needle]:
    """All needles of a prompt, those of the asked key first."""
    pairs = random.sample(range(len(_FIRST) * len(_SECOND)), NUM_KEYS[task])
    keys = [f"{_FIRST[pair % len(_FIRST)]}-{_SECOND[pair // len(_FIRST)]}" for pair in pairs]
    owners = [key for key in keys for _ in range(NUM_VALUES[task])]
    values = random.sample(range(1_000_000, 10_000_000), len(owners))
    depths = random.sample(_DEPTHS, len(owners))
    return [Needle(key, str(value), depth) for key, value, depth in zip(owners, values, depths, strict=True)]


def _frame(template: ChatTemplate | None, key: str, *, many: bool) -> tuple[str, str]:
    """What stands before and after the hidden text: instruction, question, and the beginning of the reply."""
    hidden = "Some special magic numbers are" if many else "A special magic number is"
    quiz = "numbers" if many else "number"
    instruction = (
        f"{hidden} hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {quiz} afterwards.\n\n"
    )
    asked = f"special magic {quiz} for {key} mentioned in the provided text"
    question = f"\n\nWhat are all the {asked}?" if many else f"\n\nWhat is the {asked}?"
    begun = f"The {asked} {'are' if many else 'is'}"
    opening, close = (template.opening, template.close) if template else ("", "\n\n")
    return opening + instruction, question + close + begun


def _long_answer(values: Sequence[str]) -> str:
    """The wordiest way in which models list the right numbers."""
    return f" {values[0]}." if len(values) == 1 else ":\n" + "".join(f"\n{i}. {v}" for i, v in enumerate(values, 1))
