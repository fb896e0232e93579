"""The levels of a reading while it runs: which answers are left to merge, and the tree and best answer at any time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvfold.recurse.context import Context
from kvfold.recurse.locate import overlap
from kvfold.recurse.pieces import Piece
from kvfold.recurse.tree import Node, Quote, State


class Levels:
    """Nodes of each level, unread ones included; a level is read before the next begins."""

    def __init__(self, context: Context, question: str) -> None:
        self._context, self._question = context, question
        self._levels: list[list[Node]] = []

    @property
    def depth(self) -> int:
        return len(self._levels)

    def begin(self, pieces: Sequence[Piece]) -> list[int]:
        """Start a level; returns which pieces need a call."""
        settled = [piece.settled() for piece in pieces]
        self._levels.append([node or piece.unread() for node, piece in zip(settled, pieces, strict=True)])
        return [place for place, node in enumerate(settled) if node is None]

    @property
    def last(self) -> list[Node]:
        """The nodes of the level that was begun last."""
        return self._levels[-1] if self._levels else []

    def note(self, place: int, node: Node) -> None:
        """Record what was found. A merge whose reply is not in its quotes goes on with the best of them."""
        if node.state == "dropped" and node.children:
            best = self._best([child for child in node.children if child.quote is not None])
            node = replace(node, answer=best.answer, quote=best.quote, quote_span=best.quote_span)
        self._levels[-1][place] = node

    @property
    def candidates(self) -> list[Node]:
        """Answers of the last level, in the order of the text; of a merge that was not read, what it would have
        merged."""
        found: list[Node] = []
        for node in self.last:
            if node.quote is not None:
                found.append(node)
            elif node.state == "unread":
                found += [child for child in node.children if child.quote is not None]
        return found

    @property
    def best(self) -> Node | None:
        """The answer, if one is left; of several, whose quote has most words of the question."""
        found = self.candidates
        return self._best(found) if found else None

    def _best(self, nodes: Sequence[Node]) -> Node:
        return max(nodes, key=lambda node: overlap(self._question, "" if node.quote is None else node.quote.text))

    @property
    def root(self) -> Node:
        """The tree so far; several nodes at the top get one above them."""
        top = self.last
        if len(top) == 1:
            return top[0]
        best = self.best
        state: State = "answer" if best is not None else "unread" if _all_unread(top) else "nothing"
        root = Node(self.depth + 1, 0, len(self._context.text), state, children=tuple(top))
        return root if best is None else replace(root, answer=best.answer, quote=best.quote, quote_span=best.quote_span)

    @property
    def quotes(self) -> tuple[Quote, ...]:
        """The quote of the answer, and others that have the same answer, each once."""
        best = self.best
        if best is None or best.quote is None:
            return ()
        same = [node.quote for node in self.root.walk() if node.quote and _same(node.answer, best.answer)]
        return tuple(dict.fromkeys((best.quote, *same)))


def _all_unread(nodes: Sequence[Node]) -> bool:
    return all(node.state == "unread" for node in nodes)


def _same(first: str, second: str) -> bool:
    return first.casefold() == second.casefold()
