"""The tokenizer built from a SentencePiece vocabulary against the greedy algorithm it stands for."""

from __future__ import annotations

import string
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from kvfold.models.pull import llama2c
from kvfold.models.pull import llama2c as spm
from kvfold.models.pull.llama2c import NUM_SPECIAL, Piece
from kvfold.models.pull.pull import pull
from tests.models.packages import PIECES, tokenizer_bytes

PIECES_OF_TINY = llama2c.read_pieces(tokenizer_bytes(), NUM_SPECIAL + 256 + len(PIECES))
TINY = spm.build_tokenizer(PIECES_OF_TINY)


def greedy(text: str, scores: dict[str, float]) -> list[str]:
    """Join the adjacent pair of best score, the leftmost of equals, until none is a piece."""
    symbols = list(" " + text)
    while True:
        unions = [left + right for left, right in pairwise(symbols)]
        known = [index for index, union in enumerate(unions) if union in scores]
        if not known:
            return symbols
        best = max(known, key=lambda index: (scores[unions[index]], -index))
        symbols[best : best + 2] = [unions[best]]


def expected_ids(text: str, pieces: list[Piece]) -> list[int]:
    first = NUM_SPECIAL + 256
    ids = {piece.content.decode(): first + index for index, piece in enumerate(pieces[first:])}
    scores = {piece.content.decode(): piece.score for piece in pieces[first:]}
    found = [1]
    for symbol in greedy(text, scores):
        found += [ids[symbol]] if symbol in ids else [NUM_SPECIAL + byte for byte in symbol.encode()]
    return found


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def test_pieces_and_bytes_have_the_ids_of_the_file() -> None:
    first = NUM_SPECIAL + 256
    ids = TINY.encode("abc z").ids
    assert ids == [1, first + PIECES.index(" "), first + PIECES.index("abc"), first, NUM_SPECIAL + ord("z")]


@settings(deadline=None)
@given(st.text(alphabet="abcé z\n日", min_size=1, max_size=30))
def test_text_is_joined_like_sentencepiece_and_comes_back(text: str) -> None:
    ids = TINY.encode(text).ids
    assert ids == expected_ids(text, PIECES_OF_TINY)
    assert decoded(TINY, ids) == text


@pytest.mark.model
def test_the_vocabulary_of_stories15m_joins_like_sentencepiece() -> None:
    tokenizer = Tokenizer.from_file(str(pull("stories15m", progress=False) / "tokenizer.json"))
    pieces = _pieces_of(tokenizer)
    for text in (__doc__, string.printable, "Once upon a time, Lily's dog barked: woooof!  ¿Qué? 日本語 🎉"):
        ids = tokenizer.encode(text).ids
        assert ids == expected_ids(text, pieces)
        assert decoded(tokenizer, ids) == text


def _pieces_of(tokenizer: Tokenizer) -> list[Piece]:
    """In the Llama vocabulary a piece's score is minus its place; blanks come last of all."""
    names = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [
        Piece(name.replace("▁", " ").encode(), -float(token_id) if name.strip("▁") else -1e9)
        for name, token_id in names
    ]
