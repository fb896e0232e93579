"""The tree of a reading: chunks at its leaves, merged answers above, each with its quote and its place in the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvfold.plurals import counted
from kvfold.recurse.context import Context

State = Literal["answer", "nothing", "dropped", "unread"]
CUT = " (cut at the token limit)"
_SHOWN = 100  # characters of a quote in a line


@dataclass(frozen=True)
class Quote:
    """Words of the text, verbatim: characters `start` to `end` of it, or of the file `source`."""

    text: str
    start: int
    end: int
    source: str | None = None

    @property
    def place(self) -> str:
        """Such as notes.txt:120-164."""
        return f"{self.source or ''}{':' if self.source else ''}{self.start}-{self.end}"


def quote_of(context: Context, start: int, end: int) -> Quote:
    """Characters of a context; offsets count from the begin of their file."""
    source, at = context.place(start)
    return Quote(context.text[start:end], at, at + end - start, source)


@dataclass(frozen=True)
class Node:
    """What one call, or the merge of several, found.

    Attributes:
        level: 1 reads the text itself, higher levels read the quotes of the level below.
        start: First character of the text that it covers.
        end: Where that ends.
        state: "answer"; "nothing" if the text does not say; "dropped" if the reply is not in the text; "unread".
        reply: What the model wrote.
        answer: The short answer.
        quote: The sentence of the text that has it.
        children: What was merged.
        num_tokens: Tokens of its call, the shared prefix left out; 0 without a call.
        is_cut: Whether the reply ended at the token limit.
    """

    level: int
    start: int
    end: int
    state: State
    reply: str = ""
    answer: str = ""
    quote: Quote | None = None
    quote_span: tuple[int, int] | None = None  # in the whole text
    children: tuple[Node, ...] = ()
    num_tokens: int = 0
    is_cut: bool = False

    def walk(self) -> Iterator[Node]:
        """This node and all below it."""
        yield self
        for child in self.children:
            yield from child.walk()

    def __str__(self) -> str:
        return "\n".join(tree_lines(self))

    def as_json(self) -> dict[str, Any]:
        quote = None if self.quote is None else asdict(self.quote)
        names = ("level", "start", "end", "state", "reply", "answer", "num_tokens", "is_cut")
        return {
            **{name: getattr(self, name) for name in names},
            "quote": quote,
            "children": [child.as_json() for child in self.children],
        }


def tree_lines(root: Node) -> list[str]:
    """The tree as text; neighbours that found nothing share a line.

    level 2, 0-91: 8239
    ├─ 0-40: nothing here (3 parts)
    └─ 40-91: 8239  "Bertil's membership number is 8239." 52-88
    """
    return [_line(root), *_below(root.children, "")]


def _below(nodes: Sequence[Node], indent: str) -> Iterator[str]:
    groups = _runs(nodes)
    for number, group in enumerate(groups):
        is_last = number == len(groups) - 1
        yield f"{indent}{'└─ ' if is_last else '├─ '}{_group_line(group)}"
        if len(group) == 1:
            yield from _below(group[0].children, indent + ("   " if is_last else "│  "))


def _runs(nodes: Sequence[Node]) -> list[list[Node]]:
    """Leaves that have nothing of their own to show, of one state, side by side."""
    found: list[list[Node]] = []
    for node in nodes:
        last = found[-1][-1] if found else None
        joins = last is not None and _is_alike(last, node)
        if joins:
            found[-1].append(node)
        else:
            found.append([node])
    return found


def _is_alike(first: Node, second: Node) -> bool:
    same = (first.state, first.is_cut) == (second.state, second.is_cut)
    return same and first.state in ("nothing", "unread") and not (first.children or second.children)


def _group_line(group: Sequence[Node]) -> str:
    if len(group) == 1:
        return _line(group[0])
    return f"{group[0].start}-{group[-1].end}: {_said(group[0])} ({counted(len(group), 'part')})"


def _line(node: Node) -> str:
    level = f"level {node.level}, " if node.children else ""
    line = f"{level}{node.start}-{node.end}: {_said(node)}"
    if node.state == "dropped":
        return f"{line}: {_shown(node.reply)}"
    return line if node.quote is None else f"{line}  {_shown(node.quote.text)} {node.quote.place}"


def _shown(text: str) -> str:
    shown = " ".join(text.split())
    return f'"{shown[:_SHOWN]}{"…" if len(shown) > _SHOWN else ""}"'


def _said(node: Node) -> str:
    said = {"nothing": "nothing here", "unread": "not read", "dropped": "reply is not in the text"}
    return said.get(node.state, node.answer) + (CUT if node.is_cut else "")
