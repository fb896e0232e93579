"""What names the text behind it: `Document [3]:`, `Passage 2:`, `[7]`, `Anna:`. It stays with anything it names.

A citation is of no use without the number of its document, nor a remark without its speaker. A label begins with the
line break before it, so that it begins a line in the shortened text, too. Headings, code, list items and table rows
bring the line break before them for the same reason.

    L labels   P pieces
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.base import Unit

Integers = NDArray[np.int64]
_LINE = r"(?:\A|(?<!\s)[^\S\n]*+(?=\n))(?P<label>\s*+"  # of a run of white space one place is tried: linear time
_NUMBERED = re.compile(_LINE + r"(?:(?:[^\W\d_]+ ){0,2}\[\d{1,4}\]:?|[^\W\d_]+ #?\d{1,4}:)\s++(?=\S))")
_SPEAKER = re.compile(_LINE + r"[^\W\d_a-z][\w.'’-]*(?: [\w.'’-]+){0,2}:[^\S\n]++(?=\S))")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


@dataclass(frozen=True)
class Labels:
    """Spans of labels, and where what they name ends; those of one kind do not overlap."""

    start_L: Integers
    end_L: Integers
    until_L: Integers

    @classmethod
    def numbered(cls, text: str) -> Labels:
        """Each names what follows, up to the next one."""
        found = [match.span("label") for match in _NUMBERED.finditer(text)]
        return cls._of(found, [*(start for start, _ in found[1:]), len(text)])

    @classmethod
    def speakers(cls, text: str) -> Labels:
        """Each names what follows, up to the next one or a blank line."""
        found = [match.span("label") for match in _SPEAKER.finditer(text) if not _NUMBERED.match(text, match.start())]
        after = [*(start for start, _ in found[1:]), len(text)]
        blank = (_BLANK_LINE.search(text, end, until) for (_, end), until in zip(found, after, strict=False))
        return cls._of(found, [gap.start() if gap else until for gap, until in zip(blank, after, strict=False)])

    @classmethod
    def line_breaks(cls, text: str, parts: Sequence[Unit]) -> Labels:
        """White space between a sentence and what begins a line, which needs it; up to the next sentence, since all
        that begins a line also ends one."""
        found, until = [], []
        for before, part in pairwise(parts):
            if part.kind == "sentence":
                continue
            if before.kind == "sentence":
                found.append((before.start + len(text[before.start : before.end].rstrip()), part.start))
                until.append(part.end)
            elif until:
                until[-1] = part.end
        return cls._of(found, until)

    @classmethod
    def _of(cls, found: list[tuple[int, int]], until: list[int]) -> Labels:
        spans = np.array(found, dtype=np.int64).reshape(-1, 2)
        return cls(spans[:, 0], spans[:, 1], np.array(until[: len(found)], dtype=np.int64))

    def outside(self, places: Integers) -> Integers:
        """Places of the text; one within a label becomes the label's start."""
        if not len(self.start_L):
            return places
        label = np.maximum(np.searchsorted(self.start_L, places, side="right") - 1, 0)
        is_within = (self.start_L[label] < places) & (places < self.end_L[label])
        return np.where(is_within, self.start_L[label], places)

    def pieces(self, bounds: Integers) -> Integers:
        """[P]: the piece with the label of each, -1 for one without; labels begin and end at bounds."""
        start_P = bounds[:-1]
        found_P = np.full(len(start_P), -1)
        if len(self.start_L):
            label_P = np.searchsorted(self.end_L, start_P, side="right") - 1
            named_P = (label_P >= 0) & (start_P < self.until_L[label_P])
            found_P[named_P] = np.searchsorted(bounds, self.start_L[label_P[named_P]])
        return found_P
