"""Replies become nodes with quotes, quotes are merged in groups, and there is a best answer at any time."""

from __future__ import annotations

from collections.abc import Sequence

from kvfold.recurse.chunks import chunk_text
from kvfold.recurse.context import Context
from kvfold.recurse.journal import Recorded
from kvfold.recurse.levels import Levels
from kvfold.recurse.pieces import FAN_IN, Piece, chunk_pieces, merge_pieces
from kvfold.recurse.tree import Node
from tests.recurse.texts import QUESTION

NAMES = ("Ada", "Rosa", "Bo", "Cy")
TEXT = " ".join(f"Rain fell all day. {name}'s extension is {3000 + i}." for i, name in enumerate(NAMES))
CONTEXT = Context(TEXT)


def _words(text: str) -> int:
    return len(text.split())


def _chunks(context: Context = CONTEXT, most: int = 14) -> list[Piece]:
    return chunk_pieces(context, chunk_text(context.text, most))


def _answered(levels: Levels, pieces: Sequence[Piece], replies: Sequence[str]) -> None:
    places = levels.begin(pieces)
    for place, reply in zip(places, replies, strict=False):
        levels.note(place, pieces[place].node(CONTEXT, QUESTION, Recorded(reply, 7)))


def test_a_reply_becomes_an_answer_nothing_or_is_dropped() -> None:
    piece = _chunks()[1]
    nodes = [piece.node(CONTEXT, QUESTION, Recorded(reply, 7)) for reply in (" 3001.", "nothing here", "9999")]
    assert [node.state for node in nodes] == ["answer", "nothing", "dropped"]
    quote = nodes[0].quote
    assert quote is not None and quote.text == "Rosa's extension is 3001."
    assert TEXT[quote.start : quote.end] == quote.text


def test_quotes_are_merged_and_lead_back_to_their_place() -> None:
    levels = Levels(CONTEXT, QUESTION)
    _answered(levels, _chunks(), ["3000", "3001", "nothing here", "3003"])
    (merged,) = merge_pieces(CONTEXT, levels.last, 2, 100, _words)
    lines = [f"{name}'s extension is {3000 + i}." for i, name in enumerate(NAMES) if i != 2]
    assert merged.text == "\n".join(lines)
    _answered(levels, [merged], ["Rosa's extension is 3001."])
    root = levels.root
    assert (root.state, root.level, root.start, root.end) == ("answer", 2, 0, len(TEXT))
    assert root.quote is not None and TEXT[root.quote.start : root.quote.end] == "Rosa's extension is 3001."
    assert [child.state for child in root.children] == ["answer", "answer", "nothing", "answer"]
    assert len(levels.quotes) == 1


def test_groups_hold_two_quotes_at_least_and_so_many_at_most() -> None:
    levels = Levels(CONTEXT, QUESTION)
    _answered(levels, _chunks(), ["3000", "3001", "3002", "3003"])
    assert [len(piece.spans) for piece in merge_pieces(CONTEXT, levels.last, 2, 1, _words)] == [2, 2]
    assert [len(piece.spans) for piece in merge_pieces(CONTEXT, levels.last, 2, 13, _words)] == [2, 2]
    many = [levels.last[0].__class__(1, i, i + 1, "answer", quote_span=(i, i + 1)) for i in range(2 * FAN_IN + 1)]
    assert [len(piece.spans) for piece in merge_pieces(CONTEXT, many, 2, 999, _words)] == [FAN_IN, FAN_IN, 1]


def test_one_quote_needs_no_call() -> None:
    levels = Levels(CONTEXT, QUESTION)
    _answered(levels, _chunks(), ["nothing here", "3001", "x", "nothing here"])
    assert len(levels.candidates) == 1
    root = levels.root
    assert (root.state, root.answer, len(root.children)) == ("answer", "3001", 4)
    (piece,) = merge_pieces(CONTEXT, levels.last, 2, 99, _words)
    settled = piece.settled()
    assert settled is not None and settled.answer == "3001"


def test_without_an_answer_the_tree_says_nothing_or_unread() -> None:
    levels = Levels(CONTEXT, QUESTION)
    states = [levels.root.state]
    assert (levels.best, levels.quotes) == (None, ())
    _answered(levels, _chunks(), [])
    states.append(levels.root.state)
    levels.note(0, _chunks()[0].node(CONTEXT, QUESTION, Recorded("nothing here", 7)))
    assert [*states, levels.root.state] == ["unread", "unread", "nothing"]


def test_of_several_answers_the_best_shares_most_words_with_the_question() -> None:
    levels = Levels(CONTEXT, QUESTION)
    _answered(levels, _chunks(), ["3000", "3001", "3002", "3003"])
    assert levels.best is not None and levels.best.answer == "3001"


def test_a_merge_that_is_not_in_its_quotes_goes_on_with_the_best_of_them() -> None:
    levels = Levels(CONTEXT, QUESTION)
    _answered(levels, _chunks(), ["3000", "3001", "3002", "3003"])
    _answered(levels, merge_pieces(CONTEXT, levels.last, 2, 99, _words), ["purple"])
    assert levels.root.state == "dropped"
    assert levels.best is not None and levels.best.answer == "3001"


def test_a_merge_that_was_not_read_leaves_its_answers() -> None:
    levels = Levels(CONTEXT, QUESTION)
    _answered(levels, _chunks(), ["3000", "3001", "3002", "3003"])
    _answered(levels, merge_pieces(CONTEXT, levels.last, 2, 99, _words), [])
    assert levels.best is not None and levels.best.answer == "3001"
    assert len(levels.candidates) == 4


def test_a_merge_that_finds_nothing_is_the_answer_nothing() -> None:
    levels = Levels(CONTEXT, QUESTION)
    _answered(levels, _chunks(), ["3000", "3001", "3002", "3003"])
    _answered(levels, merge_pieces(CONTEXT, levels.last, 2, 99, _words), ["nothing here"])
    assert (levels.root.state, levels.best) == ("nothing", None)


def test_the_tree_as_text() -> None:
    leaves = [Node(1, 10 * i, 10 * i + 10, "nothing") for i in range(3)]
    answer = _chunks()[1].node(CONTEXT, QUESTION, Recorded("3001", 7))
    root = Node(2, 0, 99, "answer", answer="3001", children=(*leaves, answer, Node(1, 90, 99, "unread")))
    assert str(root).splitlines() == [
        "level 2, 0-99: 3001",
        "├─ 0-30: nothing here (3 parts)",
        f'├─ {answer.start}-{answer.end}: 3001  "Rosa\'s extension is 3001." 63-88',
        "└─ 90-99: not read",
    ]


def test_offsets_of_several_files_count_from_the_begin_of_each() -> None:
    context = Context.of_files([("a.txt", "Rain fell."), ("b.txt", "Snow. Rosa's extension is 3756.")])
    (piece,) = _chunks(context, 100)
    quote = piece.node(context, QUESTION, Recorded("3756", 7)).quote
    assert quote is not None and (quote.place, quote.text) == ("b.txt:6-31", "Rosa's extension is 3756.")
