"""Words for keys and lists: common English adjectives and nouns, their pairs, and what stands for nothing (uuids)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from random import Random
from uuid import UUID


def _listed(name: str) -> tuple[str, ...]:
    return tuple((files("kvfold.bench.workloads") / name).read_text(encoding="utf-8").split())


ADJECTIVES, NOUNS = _listed("adjectives.txt"), _listed("nouns.txt")
SINGLE = tuple(sorted({*ADJECTIVES, *NOUNS}))


def pairs(random: Random) -> Iterator[str]:
    """Adjective-noun pairs without end, each once as long as there are new ones."""
    seen: set[tuple[str, str]] = set()
    while True:
        if len(seen) == len(ADJECTIVES) * len(NOUNS):
            seen.clear()
        if (pair := (random.choice(ADJECTIVES), random.choice(NOUNS))) not in seen:
            seen.add(pair)
            yield "-".join(pair)


def words(random: Random) -> Iterator[str]:
    """Single words in random order, each once; then pairs of them."""
    yield from random.sample(SINGLE, len(SINGLE))
    yield from pairs(random)


def numbers(random: Random, num_digits: int = 7) -> Iterator[str]:
    """Distinct numbers that do not begin with a zero."""
    seen: set[int] = set()
    while True:
        if (number := random.randrange(10 ** (num_digits - 1), 10**num_digits)) not in seen:
            seen.add(number)
            yield str(number)


def codes(random: Random, letters: str, length: int, count: int) -> list[str]:
    """Distinct strings of random letters."""
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(random.choices(letters, k=length))] = None
    return list(found)


def uuids(random: Random) -> Iterator[str]:
    """Version 4 identifiers."""
    while True:
        yield str(UUID(int=random.getrandbits(128), version=4))
