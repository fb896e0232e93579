"""Where a reply stands in the text it is about: the exact span of its words, and the sentence around them.

A reply whose words are not in the text has no place, and counts as dropped; nothing is ever quoted that is not there.
Nor has a reply a place whose names and numbers are not those of the quote: small models answer "Emil's extension is
3222" from a text that says so of Tilda, with the name of the question.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from kvfold.recurse.prompts import NOTHING
from kvfold.shortening.parts import parts_of
from kvfold.shortening.word_index import NO_SPACES, words_of

_NOTHING = re.compile(
    rf"(?:{NOTHING}|nothing|none|no|n/?a|unknown|no(?: one|body)|not (?:mentioned|specified|given|stated|said|found|"
    r"known)|(?:there is )?no (?:answer|information|mention)\b.*|it (?:does not|doesn't|is not|did not)\b.*|"
    r"(?:the|this) (?:(?:given|provided) )?(?:text|passage) (?:does not|doesn't|is not|did not)\b.*|"
    r"i (?:do not|don't) know.*|"
    r"(?:the answer|it|this) is (?:not|nothing|unknown)\b.*)",
    re.IGNORECASE,
)
_LEAD_IN = re.compile(r"(?:the )?answer(?: is\b(?! not\b| nothing\b| unknown\b)|:)[ :]*", re.IGNORECASE)
_QUOTED = re.compile(r"[\"“”]([^\"“”]{2,})[\"“”]")
_SENTENCE_END = re.compile(r"\n|(?<=[\w)\]\"”][.!?])\s+(?=[A-Z\"“])")
_ARTICLE = re.compile(r"^(?:the|a|an)\s+", re.IGNORECASE)
_WORD = re.compile(r"\S+")
_NAME = re.compile(r"[^\W_]+")
_MAX_QUOTE = 400  # characters of a sentence that is quoted whole
_MAX_WORDS = 64  # of an answer: runs of words are tried one after another, and their number is its square
_STRIPPED = " \t\n\"'“”.,;:"
Spans = tuple[tuple[int, int], ...]


class Found(NamedTuple):
    """Characters `start` to `end` of a text, and the quote around them, `quote_start` to `quote_end`."""

    start: int
    end: int
    quote_start: int
    quote_end: int


def short_answer(reply: str) -> str:
    """The first sentence of a reply, without "The answer is", white space, quotes and stops around it."""
    said = _SENTENCE_END.split(reply.strip(), maxsplit=1)[0].strip(_STRIPPED)
    lead = _LEAD_IN.match(said)
    return said[lead.end() :].strip(_STRIPPED) if lead else said


def says_nothing(answer: str) -> bool:
    """Whether a reply says that the text has no answer."""
    return not answer or _NOTHING.fullmatch(answer.strip(_STRIPPED)) is not None


def locate(answer: str, text: str, question: str, units: Spans | None = None) -> Found | None:
    """Where the words of an answer stand, in the unit (default: sentence) that has most words of the question; None if
    nowhere."""
    for words in _candidates(answer):
        spans = [match.span() for match in _pattern(words).finditer(text)]
        if spans:
            units = sentences(text) if units is None else units
            found = [Found(*span, *_around(units, *span)) for span in spans]
            quotes = {one[2:]: overlap(question, text[one.quote_start : one.quote_end]) for one in _distinct(found)}
            best = max(found, key=lambda one: quotes[one[2:]])
            return best if _is_of(answer, question, text[_before(units, best.quote_start) : best.quote_end]) else None
    return None


def _is_of(answer: str, question: str, said: str) -> bool:
    """Whether names and numbers of an answer stand in what is said there."""
    there = set(words_of(said))
    return all(there.issuperset(words_of(name)) for name in _names(answer, question))


def _names(answer: str, question: str) -> list[str]:
    """Words of an answer that have a digit, or that begin with a capital letter within a sentence: its own or the
    question's."""
    known = {*_capitals(question), *_capitals(answer)}
    return [word for word in _NAME.findall(answer) if word in known or any(letter.isdigit() for letter in word)]


def _capitals(text: str) -> list[str]:
    """Words with a capital letter, but the first one."""
    return [word for word in _NAME.findall(text)[1:] if word[0].isupper()]


def _before(units: Spans, start: int) -> int:
    """Where the unit before this place begins: a name may stand there, and a pronoun here."""
    place = bisect_left(units, start, key=lambda unit: unit[0])
    return units[place - 1][0] if place else 0


def _distinct(found: Iterable[Found]) -> Iterable[Found]:
    """One for each quote."""
    return {one[2:]: one for one in found}.values()


def overlap(question: str, quote: str) -> int:
    """Distinct words that a question and a quote share."""
    return len(set(words_of(question)) & set(words_of(quote)))


def _candidates(answer: str) -> Iterator[str]:
    """The whole answer, what it quotes, then its longest runs of words: at least half of them, and a number or three
    words. An article before them does not count; of a long answer, its first words do."""
    yield answer
    yield from (match[1].strip(_STRIPPED) for match in _QUOTED.finditer(answer))
    words = [match[0] for match in islice(_WORD.finditer(_ARTICLE.sub("", answer)), _MAX_WORDS)]
    for length in range(len(words) - 1, (len(words) - 1) // 2, -1):
        for start in range(len(words) - length + 1):
            run = " ".join(words[start : start + length]).strip(_STRIPPED)
            if run and (length >= 3 or any(letter.isdigit() for letter in run)):
                yield run


def _pattern(words: str) -> re.Pattern[str]:
    """The words with any white space between them, in any case, not inside of longer words."""
    inner = r"\s+".join(map(re.escape, words.split()))
    letter = rf"[^\W{NO_SPACES}]"  # Chinese and Japanese have no spaces that would end a word
    return re.compile(rf"(?<!{letter}){inner}(?!{letter})" if inner else r"(?!)", re.IGNORECASE)


@lru_cache(maxsize=64)
def sentences(text: str) -> Spans:
    """Spans of the sentences, without white space around them."""
    spans = []
    for part in parts_of(text):
        said = text[part.start : part.end]
        start = part.start + len(said) - len(said.lstrip())
        spans.append((start, max(start, part.start + len(said.rstrip()))))
    return tuple(spans)


def _around(units: Spans, start: int, end: int) -> tuple[int, int]:
    """The units that hold a span, unless they are long: then the span alone."""
    first = bisect_right(units, start, key=lambda unit: unit[1])
    behind = bisect_left(units, end, key=lambda unit: unit[0])
    low, high = (units[first][0], units[behind - 1][1]) if first < behind else (start, end)
    low, high = min(low, start), max(high, end)
    return (low, high) if high - low <= max(_MAX_QUOTE, end - start) else (start, end)
