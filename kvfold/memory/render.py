"""Facts as one section of a prompt, by id, so that the same facts are always the same text."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvfold.memory.dates import day_text
from kvfold.memory.fact import Fact

OPENING = "<memory>\nWhat the user said earlier, oldest first. Where two lines differ, the later one holds."
CLOSING = "</memory>"
_TAG = re.compile(r"<(?=\s*+(?:/\s*+)?memory)", re.IGNORECASE)


def render(facts: Iterable[Fact]) -> str:
    """The section; an empty text where there are no facts."""
    lines = [fact_line(fact) for fact in sorted(facts, key=lambda fact: fact.id)]
    return "\n".join([OPENING, *lines, CLOSING]) if lines else ""


def fact_line(fact: Fact) -> str:
    """`- 2026-03-01: Anna lives in Berlin.`; a fact cannot close its section."""
    text = _TAG.sub("&lt;", " ".join(fact.text.split()))
    end = "" if fact.valid_to is None else f" to {day_text(fact.valid_to)}"
    return f"- {day_text(fact.valid_from)}{end}: {text}"
