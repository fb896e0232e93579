"""What a sentence states, as far as plain rules for English tell: a subject, a verb, and a value.

    Since May, Anna no longer lives in Berlin.    subject "anna", verb "live", value {berlin}, negated, an update

A sentence whose verb is not known states nothing that could be compared, and supersedes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kvfold.memory.verbs import AUXILIARIES, FAMILY_OF, HELPERS, PARTICIPLES
from kvfold.memory.words import FUNCTION_WORDS
from kvfold.shortening.word_index import words_of

Kind = Literal["number", "day", "name", "word"]

_TOKEN = re.compile(r"[^\W_]+(?:['’.:@/+_-][^\W_]+)*")
_LEAD_IN = re.compile(
    r"\s*(?:[-*+•]\s+)?(?:(?:well|so|and|but|oh|hi|hello|ok|okay|yes|also|btw|by the way|fyi|update|correction|actually"
    r"|please|note|remember|that|today|nowadays)\b[\s,:;.-]*)+",
    re.IGNORECASE,
)
_WHEN = re.compile(r"(?:as of|since|from|in|on|at|after|until|last|this|next)\b[^,.;:]{1,40},\s*", re.IGNORECASE)
_UPDATES = frozenset(
    ["now", "currently", "anymore", "instead", "lately", "recently", "since", "changed", "switched", "moved"]
)
_NEGATIONS = frozenset(["not", "never", "no", "cannot", "without"])
_ENDED = frozenset(["stopped", "quit", "ceased"])  # before a verb in -ing
_BESIDE = frozenset(["now", "currently", "no", "longer", "not", "never", "still", "also", "just", "always", "recently"])
_ARTICLES = frozenset(["the", "a", "an"])
_NEW = frozenset(["new", "newest", "current", "latest"])  # my new number is my number, and it has changed
_DAYS = frozenset(
    words_of(
        "monday tuesday wednesday thursday friday saturday sunday january february march april may june july august "
        "september october november december noon midnight morning afternoon evening today tomorrow"
    )
)
_NOBODY = frozenset(["there", "it", "that", "this", "which", "who", "what"])  # subjects that name nothing
_POSSESSIVES = frozenset(["my", "your", "his", "her", "its", "our", "their", "mine", "yours", "hers", "ours", "theirs"])
_MAX_SUBJECT = 8  # words


@dataclass(frozen=True)
class Statement:
    """Subject, verb family and value of one sentence."""

    subject: str
    verb: str
    values: frozenset[str]
    kind: Kind
    is_negated: bool
    is_update: bool  # it says itself that something changed
    owners: frozenset[str] = frozenset()  # whose the value is: Ben's, my

    @property
    def words(self) -> frozenset[str]:
        """What two statements share if they speak of the same: words of the subject, the verb, the value."""
        verb = frozenset() if self.verb == "be" else frozenset([f"={self.verb}"])
        return frozenset(words_of(self.subject)) | verb | self.values


def statement_of(text: str) -> Statement | None:
    """What a sentence states; None if that cannot be told."""
    lead = _LEAD_IN.match(text)
    rest = text[lead.end() :] if lead else text
    when = _WHEN.match(rest)
    rest = rest[when.end() :] if when else rest
    tokens = _TOKEN.findall(rest.replace("’", "'"))
    lower = [token.lower() for token in tokens]
    at = _verb_at(lower)
    if at is None:
        return None
    subject = " ".join(
        word for word in lower[:at] if word not in _BESIDE and not _is_helper(word) and word not in _ENDED
    )
    is_new = bool(_NEW & set(subject.split()))
    subject = re.sub(rf"^(?:{'|'.join(_ARTICLES)})\s+|\b(?:{'|'.join(_NEW)})\s+", "", subject)
    if not subject or subject.split()[-1] in _NOBODY:
        return None
    around = {*lower[max(0, at - 3) : at + 2], *lower[-1:]}
    negated = bool(around & (_NEGATIONS | _ENDED)) or any(word.endswith("n't") for word in around)
    values = [token for token in tokens[at + 1 :] if not _is_filler(token.lower())]
    is_update = (
        is_new or bool(_UPDATES & set(lower)) or bool(lead and re.search("update|correction|actually", lead[0], re.I))
    )
    kept = frozenset(word for token in values for word in [token.lower().removesuffix("'s")])
    owners = frozenset(word for word in lower[at + 1 :] if word.endswith("'s") or word in _POSSESSIVES)
    return Statement(subject, FAMILY_OF[lower[at]], kept, _kind(values), negated, is_update, owners)


def _verb_at(lower: list[str]) -> int | None:
    """The first known verb behind a subject; of `is living` and `has moved` the second word. A dog called Rex is no
    verb's subject: `called` needs an auxiliary before it."""
    for at, word in enumerate(lower[: _MAX_SUBJECT + 3]):
        if at and word in FAMILY_OF and word not in PARTICIPLES:
            if word in AUXILIARIES:
                behind = (next for next in range(at + 1, min(at + 4, len(lower))) if lower[next] in FAMILY_OF)
                found = next(behind, None)
                if found is not None and all(_is_filler(between) for between in lower[at + 1 : found]):
                    return found
            return at
    return None


def _is_helper(word: str) -> bool:
    return word in HELPERS or word.endswith("n't") or word in AUXILIARIES


def _is_filler(word: str) -> bool:
    return word in _BESIDE or word in _UPDATES or words_of(word) == [] or words_of(word)[0] in FUNCTION_WORDS


def _kind(values: list[str]) -> Kind:
    """Of the first value that says one: a number, a day, a name, else words."""
    if any(token.lower() in _DAYS or re.fullmatch(r"\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}", token) for token in values):
        return "day"
    if any(any(char.isdigit() for char in token) for token in values):
        return "number"
    return "name" if any(token[0].isupper() for token in values) else "word"
