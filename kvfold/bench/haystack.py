"""Filler text to hide needles in: the project's own seeded prose, or the sentences of a given text or JSON of essays.

A haystack is a function from a random generator to an endless run of sentences; the same generator state gives the
same sentences on every machine.

The project's own prose (prose.json) needs no corpus. A quarter of its sentences hold numbers (years, counts, prices,
times, serial numbers of up to seven digits): a score that keeps whatever has a digit finds no needle by that alone.
Braces of a pattern name a word list: a topic's own `{who}`, `{where}`, `{what}`, one of `WORDS`, which all topics
share, or one of `NUMBERS`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from kvfold.errors import InputError
from kvfold.text_io import read_text_file

Haystack = Callable[[Random], Iterator[str]]
OWN_PROSE = "own prose with numbers"  # the name of what the project brings along; runs on another do not merge

_PARAGRAPH = (5, 9)  # sentences on one topic before the next
_OWN_SHARE, _NUMBERED_SHARE = 0.5, 0.25  # of a paragraph: its topic's patterns, those with numbers; the rest fit any
_END_OF_SENTENCE = re.compile(r"(?<=[.!?])\s+")


class Topic(NamedTuple):
    """Word lists and sentence patterns of one subject."""

    who: list[str]
    where: list[str]
    what: list[str]
    patterns: list[str]


_OWN: dict[str, Any] = json.loads((files("kvfold.bench") / "prose.json").read_text(encoding="utf-8"))
WORDS: dict[str, list[str]] = _OWN["words"]
NUMBERS: dict[str, tuple[int, int]] = _OWN["numbers"]  # smallest and largest value; `year2`: a second one in a sentence
ANY: list[str] = _OWN["any"]  # patterns that fit every topic
NUMBERED: list[str] = _OWN["numbered"]
TOPICS = [Topic(**topic) for topic in _OWN["topics"]]


def prose(random: Random) -> Iterator[str]:
    """Plausible sentences without end and, for thousands of them, without repetition; topics change."""
    said: set[str] = set()
    while True:
        topic = random.choice(TOPICS)
        for pattern in _paragraph(topic, random):
            sentence = _fill(pattern, topic, random)
            if sentence not in said:
                said.add(sentence)
                yield sentence


def from_text(text: str) -> Haystack:
    """The sentences of a text in their order, from a random one on, round and round."""
    sentences = [" ".join(part.split()) for part in _END_OF_SENTENCE.split(text) if part.strip()]
    if not sentences:
        raise InputError("the haystack holds no sentence; give a file with text")

    def read(random: Random) -> Iterator[str]:
        return (sentences[i % len(sentences)] for i in count(random.randrange(len(sentences))))

    return read


def read_text(path: Path) -> str:
    """A file of plain text or, if its name ends in .json, of one {"text": …} or a list of them, joined in order."""
    content = read_text_file(path)
    return "\n\n".join(_essays(path, content)) if path.suffix == ".json" else content


def _essays(path: Path, content: str) -> list[str]:
    try:
        found: Any = json.loads(content)
        return [essay["text"].strip() for essay in (found if isinstance(found, list) else [found])]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise InputError(
            f'{path} is no JSON of essays; give {{"text": "…"}}, a list of such objects, or plain text as a .txt file'
        ) from None


def _paragraph(topic: Topic, random: Random) -> list[str]:
    length = random.randint(*_PARAGRAPH)
    num_own, num_numbered = round(_OWN_SHARE * length), round(_NUMBERED_SHARE * length)
    patterns = random.sample(topic.patterns, num_own) + random.sample(NUMBERED, num_numbered)
    patterns += random.sample(ANY, length - num_own - num_numbered)
    random.shuffle(patterns)
    return patterns


def _fill(pattern: str, topic: Topic, random: Random) -> str:
    first, second = random.sample(WORDS["name"], 2)
    words = {name: random.choice(choices) for name, choices in WORDS.items()}
    words |= {"who": random.choice(topic.who), "where": random.choice(topic.where), "what": random.choice(topic.what)}
    words |= {"name": first, "name2": second, "who_": _capital(words["who"])}
    words |= {name: str(random.randint(*bounds)) for name, bounds in NUMBERS.items()}
    return _capital(pattern.format(**words))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
