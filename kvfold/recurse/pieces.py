"""What one call reads: a chunk of the text, or quotes of the level below, each mapped back to its place in the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from kvfold.recurse.chunks import Chunk
from kvfold.recurse.context import Context
from kvfold.recurse.journal import Recorded
from kvfold.recurse.locate import Spans, locate, says_nothing, short_answer
from kvfold.recurse.tree import Node, quote_of
from kvfold.shortening.bm25 import bm25
from kvfold.shortening.word_index import WordIndex

FAN_IN = 16  # quotes that one call merges: small models read short lists well


@dataclass(frozen=True)
class Piece:
    """A text for one call; `spans` are where its lines, or its one chunk, stand in the whole text."""

    level: int
    text: str
    spans: Spans
    children: tuple[Node, ...] = ()

    @property
    def start(self) -> int:
        return min((child.start for child in self.children), default=self.spans[0][0])

    @property
    def end(self) -> int:
        return max((child.end for child in self.children), default=self.spans[-1][1])

    def settled(self) -> Node | None:
        """The node of quotes that need no call: there is one, or all are the same."""
        if not self.children or len(self.spans) != 1:
            return None
        if len(self.children) == 1:
            return self.children[0]
        only = next(child for child in self.children if child.quote_span is not None)
        return replace(self.unread(), state="answer", answer=only.answer, quote=only.quote, quote_span=only.quote_span)

    def unread(self) -> Node:
        return Node(self.level, self.start, self.end, "unread", children=self.children)

    def node(self, context: Context, question: str, reply: Recorded) -> Node:
        """What a reply says about this piece: an answer with its quote, nothing, or words that are not in it."""
        answer = short_answer(reply.text)
        base = Node(
            self.level,
            self.start,
            self.end,
            "nothing",
            reply.text,
            children=self.children,
            num_tokens=reply.num_tokens,
            is_cut=reply.is_cut,
        )
        if says_nothing(answer):
            return base
        span = self._quote(answer, question)
        if span is None:
            return replace(base, state="dropped")
        return replace(base, state="answer", answer=answer, quote=quote_of(context, *span), quote_span=span)

    def _quote(self, answer: str, question: str) -> tuple[int, int] | None:
        """The sentence, or the line, that has the answer, in the whole text."""
        if not self.children:
            found = locate(answer, self.text, question)
            first = self.spans[0][0]
            return None if found is None else (first + found.quote_start, first + found.quote_end)
        lines = _lines([end - start for start, end in self.spans])
        found = locate(answer, self.text, question, lines)
        return (
            None
            if found is None
            else next(
                (span for span, (low, high) in zip(self.spans, lines, strict=True) if low <= found.start < high), None
            )
        )


def chunk_pieces(context: Context, chunks: Sequence[Chunk]) -> list[Piece]:
    return [Piece(1, context.text[one.start : one.end], ((one.start, one.end),)) for one in chunks]


def merge_pieces(
    context: Context, nodes: Sequence[Node], level: int, most: int, count: Callable[[str], int]
) -> list[Piece]:
    """Neighbouring nodes in groups with at most FAN_IN quotes and `most` tokens of them, but two at least."""
    groups: list[list[Node]] = [[]]
    num_quotes = num_tokens = 0
    for node in nodes:
        if node.quote_span is not None:
            more = count(context.text[slice(*node.quote_span)]) + 1
            if num_quotes >= 2 and (num_quotes == FAN_IN or num_tokens + more > most):
                groups.append([])
                num_quotes = num_tokens = 0
            num_quotes, num_tokens = num_quotes + 1, num_tokens + more
        groups[-1].append(node)
    return [_merged(context, group, level) for group in groups]


def _merged(context: Context, group: Sequence[Node], level: int) -> Piece:
    """Equal quotes once."""
    spans = tuple(dict.fromkeys(node.quote_span for node in group if node.quote_span is not None))
    return Piece(level, "\n".join(context.text[low:high] for low, high in spans), spans, tuple(group))


def by_relevance(question: str, pieces: Sequence[Piece], places: Sequence[int]) -> list[int]:
    """Places of pieces, ranked by BM25 against the question; equal ones in the order of the text."""
    score_N = bm25(WordIndex.of([piece.text for piece in pieces]), question)
    return sorted(places, key=lambda place: -float(score_N[place]))


def _lines(lens: Sequence[int]) -> Spans:
    """Where lines of these lengths stand, with a line end between two."""
    starts = [0, *accumulate(length + 1 for length in lens)]
    return tuple((start, start + length) for start, length in zip(starts, lens, strict=False))
