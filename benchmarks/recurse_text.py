"""Generated prose of any length with planted facts that resemble one another, and a question about one of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import Any

from kvfold.bench.haystack import WORDS, prose
from kvfold.shortening.tokens import TokenOffsets

_THINGS = ("locker number", "door code", "customer number", "parking space", "membership number", "extension")
_EVERY = 1000  # tokens between two facts
_CHARS_PER_TOKEN = 6  # more than any tokenizer has on this prose


@dataclass(frozen=True)
class Question:
    """A text, what is asked about it, and the number that a right answer has."""

    text: str
    question: str
    answer: str


def planted(length: int, index: int, tokenizer: Any = None) -> Question:
    """Question `index` of this length: facts stand about every thousand tokens, and a random one is asked for."""
    random = Random(f"recurse/{length}/{index}")
    said, sentences, num_chars = [], prose(random), 0
    while num_chars < length * _CHARS_PER_TOKEN:
        said.append(next(sentences))
        num_chars += len(said[-1]) + 1
    ends = list(accumulate(len(sentence) + 1 for sentence in said))
    starts = TokenOffsets.of(" ".join(said), tokenizer).starts
    said = said[: max(1, bisect_right(ends, int(starts[min(length, len(starts) - 1)])))]
    pairs = [(name, thing) for name in WORDS["name"] for thing in _THINGS]
    facts = random.sample(pairs, min(len(pairs), max(1, length // _EVERY)))
    values = random.sample(range(1000, 10_000), len(facts))
    for number, ((name, thing), value) in enumerate(zip(facts, values, strict=True)):
        place = int((number + random.random()) * len(said) / len(facts))
        said[place] = f"{said[place]} Please note that {name}'s {thing} is {value}."
    (name, thing), value = random.choice(list(zip(facts, values, strict=True)))
    return Question(" ".join(said), f"What is {name}'s {thing}?", str(value))
