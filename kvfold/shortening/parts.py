"""The parts of a text by its layout: fenced code, headings, list items, table rows, and sentences of paragraphs.

Parts cover the text without gaps. What is between two of them (blank lines, spaces) belongs to the one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from nupunkt import sent_spans

from kvfold.shortening.base import Kind, Unit

_FENCE = re.compile(r"\s{0,3}(```+|~~~+)")
_HEADING = re.compile(r"\s{0,3}#{1,6}\s+\S")
_UNDERLINE = re.compile(r"\s{0,3}(=+|-+)\s*$")
_ITEM = re.compile(r"\s*(?:[-*+•]|\d{1,3}[.)])\s+\S")
_ROW = re.compile(r"[^|\n]*\|[^|\n]*\||[^\t\n]*\t[^\t\n]*\t")
_TITLE = re.compile(r"\s*[^\W_a-z].{0,78}\S\s*$")
_SENTENCE_MARK = re.compile(r"[.!?:;,…：；，、؟।][\"'”’»）)]*\s*$|[。！？]")  # at the end of a line, or anywhere in it
_CJK_END = re.compile(r"[。！？]+[”’」』）]*\s*")  # where nupunkt, made for spaces between words, sees no end
_LINE_END = re.compile(
    r"(?<=[.!?…])[”’\"')\]]*[^\S\n]*\n\s*(?=[^\W_a-z])"
)  # where nupunkt sees none: one sentence a line
_MAX_CHARS = 2000  # of a sentence; what has no end is cut at white space


def parts_of(text: str) -> tuple[Unit, ...]:
    """Units by layout, in the order of the text."""
    starts: list[tuple[int, Kind]] = []
    for start, end, kind in _blocks(text):
        if kind == "sentence":
            starts += [(at, "sentence") for at in _sentences(text, start, end)]
        else:
            starts.append((start, kind))
    if not starts:
        return ()
    starts[0] = (0, starts[0][1])
    ends = [start for start, _ in starts[1:]] + [len(text)]
    return tuple(Unit(start, end, kind) for (start, kind), end in zip(starts, ends, strict=True))


def ends_paragraph(text: str, part: Unit) -> bool:
    """Whether a blank line stands behind a part."""
    inner = text[part.start : part.end]
    return inner.count("\n", len(inner.rstrip())) > 1


def _blocks(text: str) -> Iterator[tuple[int, int, Kind]]:
    """Runs of lines of one kind, without the blank lines around them; lines of a paragraph together."""
    lines = [(match.start(), match.end()) for match in re.finditer(r"[^\n]*\n|[^\n]+$", text)]
    at = 0
    while at < len(lines):
        start, end = lines[at]
        line = text[start:end]
        if not line.strip():
            at += 1
            continue
        if fence := _FENCE.match(line):
            last = _closing(text, lines, at, fence[1][:3])
            yield start, lines[last][1], "code"
            at = last + 1
            continue
        if _HEADING.match(line):
            yield start, end, "heading"
        elif _ROW.match(line):
            yield start, end, "row"
        elif _ITEM.match(line):
            last = _item_end(text, lines, at)
            yield start, lines[last][1], "item"
            at = last
        else:
            last = _paragraph_end(text, lines, at)
            yield from _paragraph(text, lines[at : last + 1])
            at = last
        at += 1


def _closing(text: str, lines: list[tuple[int, int]], at: int, mark: str) -> int:
    """The line that closes a fence, or the last one."""
    for number in range(at + 1, len(lines)):
        if text[slice(*lines[number])].strip().startswith(mark):
            return number
    return len(lines) - 1


def _item_end(text: str, lines: list[tuple[int, int]], at: int) -> int:
    """The last line of an item: indented lines behind it go on with it."""
    for number in range(at + 1, len(lines)):
        line = text[slice(*lines[number])]
        if not line.strip() or not line[0].isspace() or _ITEM.match(line):
            return number - 1
    return len(lines) - 1


def _paragraph_end(text: str, lines: list[tuple[int, int]], at: int) -> int:
    for number in range(at + 1, len(lines)):
        line = text[slice(*lines[number])]
        if number == at + 1 and _UNDERLINE.match(line):
            return number
        if not line.strip() or any(mark.match(line) for mark in (_FENCE, _HEADING, _ROW, _ITEM)):
            return number - 1
    return len(lines) - 1


def _paragraph(text: str, lines: list[tuple[int, int]]) -> Iterator[tuple[int, int, Kind]]:
    """A paragraph; one line that ends like no sentence is a heading, and so is a line above ==== or ----."""
    start, end = lines[0][0], lines[-1][1]
    is_underlined = len(lines) == 2 and _UNDERLINE.match(text[slice(*lines[1])])
    is_title = len(lines) == 1 and _TITLE.match(text[start:end]) and not _SENTENCE_MARK.search(text[start:end])
    if is_underlined or is_title:
        yield start, end, "heading"
    else:
        yield start, end, "sentence"


def _sentences(text: str, start: int, end: int) -> Iterator[int]:
    """First characters of the sentences of a paragraph."""
    block = text[start:end]
    cuts = {
        0,
        *(low for low, _ in sent_spans(block)),
        *(match.end() for mark in (_CJK_END, _LINE_END) for match in mark.finditer(block)),
    }
    bounds = [*sorted(cut for cut in cuts if cut < len(block)), len(block)]
    for low, high in pairwise(bounds):
        yield start + low
        yield from (start + cut for cut in _cuts(block, low, high))


def _cuts(block: str, low: int, high: int) -> Iterator[int]:
    """Where a run of characters that is too long is cut: behind the last white space that fits, else anywhere."""
    while high - low > _MAX_CHARS:
        space = max(block.rfind(" ", low, low + _MAX_CHARS), block.rfind("\n", low, low + _MAX_CHARS))
        low = space + 1 if space > low else low + _MAX_CHARS
        yield low
