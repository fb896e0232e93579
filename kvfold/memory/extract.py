"""Facts of a turn: its sentences, list items and rows, word for word. No model is called.

Questions, code, marked headings and single words are no facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvfold.memory.fact import MAX_TEXT
from kvfold.shortening.parts import parts_of
from kvfold.shortening.word_index import words_of

_QUESTION_MARKS = ("?", "？", "؟")
_CLOSING = "\"'”’)]»"
_MIN_WORDS = 2


class Span(NamedTuple):
    """Characters `start` to `end` of a turn."""

    start: int
    end: int


def fact_spans(text: str) -> list[Span]:
    """Where facts stand in a turn, in order, without white space around them."""
    found: list[Span] = []
    for part in parts_of(text):
        if part.kind == "code":
            continue
        for span in _cut(text, part.start, part.end):
            if _is_fact(text[span.start : span.end]):
                found.append(span)
    return found


def clean(text: str) -> str:
    """The same characters, lone surrogates and NUL, which no file keeps, as question marks."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def _is_fact(text: str) -> bool:
    is_question = text.rstrip(_CLOSING).endswith(_QUESTION_MARKS)
    return not is_question and not text.startswith("#") and len(words_of(text)) >= _MIN_WORDS


def _cut(text: str, start: int, end: int) -> Iterator[Span]:
    """The part without white space around it, cut behind white space where it is too long for one fact."""
    while end - start > MAX_TEXT:
        space = text.rfind(" ", start + 1, start + MAX_TEXT)
        cut = space if space > 0 else start + MAX_TEXT
        yield _stripped(text, start, cut)
        start = cut
    yield _stripped(text, start, end)


def _stripped(text: str, start: int, end: int) -> Span:
    piece = text[start:end]
    left = len(piece) - len(piece.lstrip())
    return Span(start + left, start + max(left, len(piece.rstrip())))
