"""Spans of a text that must stay verbatim: numbers with units, ids, code, quotes, URLs, headings, negations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np

from kvfold.errors import PolicyError, SizeError
from kvfold.policy.size import number_text
from kvfold.shortening.base import Bools, Task, Unit

_UNIT = (
    r"%|‰|°[CF]?|€|£|¥|\$|km/h|[kMGT]?i?[Bb](?:it)?s?/?s?|[munkM]?[mgslVAWJN]|mph|h|min|days?|hours?|minutes?|seconds?|"
    r"weeks?|months?|years?|percent|million|billion|thousand|dollars?|euros?|tokens?|kg|mg|cm|mm|km|ms|Hz|[kMG]Hz|USD|EUR"
)
_PATTERNS = {  # in linear time: a long run of one kind of characters is not read anew from each of them
    "numbers": re.compile(
        rf"(?<!\w)(?:[$€£¥]\s?\d[\d.,]*|[-+]?\d[\d.,]{{0,63}}+\s?(?:{_UNIT})(?!\w)|\d{{1,4}}[-/.]\d{{1,2}}[-/.]\d{{1,4}}|"
        r"\d{1,2}:\d{2}(?::\d{2})?)"
    ),
    "ids": re.compile(  # digits that are no year, words of letters and digits that are no ordinal: up to 256 characters
        r"(?<![\w.,])(?=[A-Za-z0-9][\w-]{3,255}+(?![\w-]))"
        r"(?:(?!1[5-9]\d\d\b|20\d\d\b)\d{4,}|(?!\d+(?:st|nd|rd|th|s)\b)(?=[\w-]*\d)(?=[\w-]*[A-Za-z])[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*)(?![\w-]|[.,]\d)"
    ),
    "quotes": re.compile(r"\"[^\"\n]{2,400}\"|“[^”\n]{2,400}”|«[^»\n]{2,400}»|`[^`\n]{2,400}`"),
    "urls": re.compile(r"(?:https?|ftp)://\S+|www\.\S+|(?<![\w.+-])[\w.+-]++@[\w-]++\.[\w.-]+"),
    "negations": re.compile(r"\b(?:not|never|except|unless|only|no|none|cannot|without)\b|n['’]t\b", re.IGNORECASE),
}
_LAYOUT = {"code": "code", "headings": "heading"}
KINDS = (*_PATTERNS, *_LAYOUT)


def kinds_of(text: str) -> tuple[str, ...]:
    """The kinds that `numbers, code` names; `all` and `none` stand for themselves."""
    words = [word.strip() for word in text.split(",")]
    if words in (["all"], ["none"]):
        return KINDS if words == ["all"] else ()
    for word in words:
        if word in ("all", "none"):
            raise PolicyError(f"{word} stands alone, and here are {len(words)} kinds; write {word}, or the kinds")
        if word not in KINDS and word.lower() in (*KINDS, "all", "none"):
            raise PolicyError(f'"{word}" is written {word.lower()}')
        if word not in KINDS:
            raise PolicyError(f'"{word}" is nothing that can be kept; kinds: {", ".join(KINDS)}, all, none')
    return tuple(kind for kind in KINDS if kind in words)


def protected_spans(text: str, kinds: Iterable[str] = tuple(_PATTERNS)) -> list[tuple[int, int]]:
    """Spans of these kinds, ascending; they may overlap."""
    return sorted(match.span() for kind in kinds if kind in _PATTERNS for match in _PATTERNS[kind].finditer(text))


def kept_spans(task: Task) -> list[tuple[int, int]]:
    """What stays word for word, ascending: spans and parts of the kinds that are kept, and the ends of a message."""
    layout = {_LAYOUT[kind] for kind in task.keep if kind in _LAYOUT}
    ends_n = np.zeros(len(task.parts), dtype=bool) if task.ends_n is None else task.ends_n
    parts = [part for part, is_end in zip(task.parts, ends_n, strict=True) if is_end or part.kind in layout]
    return sorted([*protected_spans(task.text, task.keep), *((part.start, part.end) for part in parts)])


def protected_parts(text: str, parts: Sequence[Unit], kinds: Sequence[str]) -> Bools:
    """[n]: parts of a protected layout, and parts that hold a protected span or a piece of one."""
    layout = {_LAYOUT[kind] for kind in kinds if kind in _LAYOUT}
    kept_n = np.array([part.kind in layout for part in parts], dtype=bool)
    starts = np.array([part.start for part in parts])
    for low, high in protected_spans(text, kinds):
        first, last = np.searchsorted(starts, (low, high - 1), side="right") - 1
        kept_n[first : last + 1] = True
    return kept_n


def check_room(task: Task, needed: int) -> None:
    """SizeError if the tokens that must stay are more than may."""
    if needed > task.target:
        has_ends = task.ends_n is not None and bool(task.ends_n.any())
        named = ", ".join([*task.keep, *(["the ends of the message"] if has_ends else [])])
        raise SizeError(
            f"what must stay ({named}) is {needed} tokens, and of {len(task.tokens)} tokens {task.target} may; "
            f"{'keep less, such as keep=none, or ' if task.keep else ''}{_sizes(task, needed)}"
        )


def none_fits(task: Task, needed: int) -> SizeError:
    """The error where no unit fits into the target beside what must stay; `needed`: the tokens with the smallest."""
    has_chunks = any(unit.kind == "chunk" for unit in task.units)
    return SizeError(
        f"of {len(task.tokens)} tokens {task.target} may stay, and no unit of the text fits: with one and what must "
        f"stay there are {needed} tokens; "
        f"{'part the text more finely, such as units=sentences, or ' if has_chunks else ''}{_sizes(task, needed)}"
    )


def _sizes(task: Task, needed: int) -> str:
    return f"shorten to {number_text(math.floor(10 * len(task.tokens) / needed) / 10)}x or {needed}tok"
