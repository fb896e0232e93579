"""Markup that cannot be confused with text: a string becomes `Html` by being escaped, and only `Html` is nested.

What models write stands in the page, so every answer is text until `text` has escaped it; mypy refuses a plain string
where markup belongs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NewType

Html = NewType("Html", str)
Attribute = str | int | float | bool | None
NOTHING = Html("")
_VOID = frozenset({"meta"})
_TALL = 24  # rows from which a table scrolls up and down, too


def text(content: object) -> Html:
    return Html(escape(str(content), quote=False))


def join(parts: Iterable[Html], between: str = "") -> Html:
    return Html(between.join(parts))


def tag(name: str, /, *content: Html, **attributes: Attribute) -> Html:
    """`class_` writes class, `data_scope` data-scope; True writes a bare attribute, None and False none."""
    opening = f"<{name}{''.join(_attribute(key, value) for key, value in attributes.items())}>"
    return Html(opening if name in _VOID else f"{opening}{''.join(content)}</{name}>")


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{escape(_number(value) if isinstance(value, float) else str(value))}"'


def _number(value: float) -> str:
    """Tenths are as fine as a screen shows."""
    return f"{value:.1f}".removesuffix(".0")


def table(headings: Sequence[str], rows: Iterable[Sequence[Html]], *, words: int = 1, **attributes: Attribute) -> Html:
    """Scrolls inside itself; the first `words` columns are words, set to the left, and the others numbers."""
    head = tag("tr", *(tag("th", text(name), scope="col", class_=_side(i, words)) for i, name in enumerate(headings)))
    body = [tag("tr", *(tag("td", cell, class_=_side(i, words)) for i, cell in enumerate(row))) for row in rows]
    inner = tag("table", tag("thead", head), tag("tbody", *body), **attributes)
    kind = "scroll tall" if len(body) > _TALL else "scroll"
    return tag("div", inner, class_=kind, tabindex=0, role="region", aria_label="table")


def _side(column: int, words: int) -> str | None:
    return None if column < words else "num"


def embedded_json(identifier: str, content: Any) -> Html:
    """JSON inside a script element: no `<` is left that could end the element or begin a comment."""
    safe = json.dumps(content, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return tag("script", Html(safe), type="application/json", id=identifier)


def buttons(group: str, labels: Sequence[str], chosen: str) -> Html:
    """One of several views; views are elements with data-GROUP. Shown by the script alone: without it, the chosen
    view stands there."""
    if len(labels) < 2:
        return NOTHING
    made = (
        tag("button", text(label), type="button", data_choose=label, aria_pressed=str(label == chosen).lower())
        for label in labels
    )
    return tag("div", *made, class_="buttons", data_group=group, role="group", aria_label="views", hidden=True)


def view(group: str, label: str, chosen: str, *content: Html) -> Html:
    """What one button shows."""
    return tag("div", *content, data_view=group, data_name=label, hidden=label != chosen)
