"""One fact: a sentence of a turn, word for word, and when it was valid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from kvfold.memory.dates import date_text
from kvfold.text_io import is_utf8

MAX_TEXT = 2000  # characters of a fact
MAX_IMPORTANCE = 10.0
MAX_NAME = 512  # characters of a user, a tenant or a source


class Owner(NamedTuple):
    """Whose facts they are: every row and every look-up has both names, so nobody reads another's."""

    tenant: str
    user: str


def is_name(text: str) -> bool:
    """Whether a user can be called so: what a file keeps as it is, so that two names are never one."""
    return not name_fault(text)


def name_fault(text: str) -> str:
    """What is wrong with a name; empty if nothing is."""
    if not text.strip():
        return "it is empty"
    if len(text) > MAX_NAME:
        return f"it has {len(text):,} characters"
    if "\0" in text:
        return "it has a NUL character in it"
    return "" if is_utf8(text) else "it is no Unicode text"


@dataclass(frozen=True)
class Fact:
    """A sentence that a user stated. `id` counts the facts of one user; times are seconds since 1970.

    It is valid from `valid_from` until before `valid_to`; None: until now. `source` names the turn it comes from, and
    characters `start` to `end` of that turn are `text`. `importance` multiplies its score, `uses` counts recalls.
    """

    id: int
    user: str
    text: str
    source: str
    start: int
    end: int
    valid_from: float
    valid_to: float | None = None
    importance: float = 1.0
    uses: int = 0
    supersedes: int | None = None  # the id of the fact that ended when this one began
    embedder: str = ""  # name and digest of what made the vector
    embedding: bytes = b""  # int8, a unit vector times 127

    def is_valid(self, at: float) -> bool:
        return self.valid_from <= at and (self.valid_to is None or at < self.valid_to)

    def to_json(self) -> dict[str, Any]:
        """What `kvfold memory export` writes: everything but the vector, which the text gives."""
        return {
            "id": self.id,
            "user": self.user,
            "text": self.text,
            "source": self.source,
            "span": [self.start, self.end],
            "valid_from": date_text(self.valid_from),
            "valid_to": None if self.valid_to is None else date_text(self.valid_to),
            "importance": self.importance,
            "uses": self.uses,
            "supersedes": self.supersedes,
        }
