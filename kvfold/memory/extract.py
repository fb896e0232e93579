"""Facts of a turn: its sentences, list items and rows, word for word. No model is called.

Questions, code, marked headings and single words are no facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvfold.memory.fact import MAX_TEXT
from kvfold.shortening.base import Unit
from kvfold.shortening.parts import parts_of
from kvfold.shortening.word_index import words_of

_QUESTION_MARKS = ("?", "？", "؟")
_CLOSING = "\"'”’)]»"
_MIN_WORDS = 2
_NUM_ASKED = 2


class Span(NamedTuple):
    """Characters `start` to `end` of a turn."""

    start: int
    end: int


def fact_spans(text: str) -> list[Span]:
    """Where facts stand in a turn, in order, without white space around them."""
    return [span for span in _spans(text) if _is_fact(text[span.start : span.end])]


def question_in(text: str) -> str:
    """Of a turn its last two questions; of one without questions its last two sentences."""
    sentences = [text[start:end] for start, end in _spans(text) if start < end]
    asked = [sentence for sentence in sentences if _is_question(sentence)]
    return " ".join((asked or sentences)[-_NUM_ASKED:])


def clean(text: str) -> str:
    """The same characters, lone surrogates and NUL, which no file keeps, as question marks."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def _spans(text: str) -> Iterator[Span]:
    for part in parts_of(text):
        for start, end in _sentences(text, part):
            yield from _cut(text, start, end)


def _sentences(text: str, part: Unit) -> Iterator[Span]:
    """Of a line without a full stop, which a document has as a heading, its sentences."""
    piece = text[part.start : part.end].rstrip()
    if part.kind == "heading" and not piece.lstrip().startswith("#"):
        for unit in parts_of(f"{piece}."):
            yield Span(part.start + unit.start, part.start + min(unit.end, len(piece)))
    elif part.kind != "code":
        yield Span(part.start, part.end)


def _is_fact(text: str) -> bool:
    return not _is_question(text) and not text.startswith("#") and len(words_of(text)) >= _MIN_WORDS


def _is_question(text: str) -> bool:
    return text.rstrip(_CLOSING).endswith(_QUESTION_MARKS)


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
