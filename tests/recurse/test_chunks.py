"""Chunks cover the text in order, hold at most so many tokens, end with sentences, and are as few as can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.errors import InputError
from kvfold.recurse.chunks import chunk_text, num_calls
from kvfold.shortening.tokens import TokenOffsets

SENTENCE = "The cat saw one bird in that old tree. "  # ten words and marks


@pytest.mark.parametrize(("chunk_tokens", "expected"), [(4_000, 25), (32_000, 4)])
def test_100000_tokens_need_25_calls_of_4000_or_4_of_32000(chunk_tokens: int, expected: int) -> None:
    text = SENTENCE * 10_000
    assert len(TokenOffsets.of(text)) == 100_000
    assert num_calls(100_000, chunk_tokens) == expected
    assert len(chunk_text(text, chunk_tokens)) == expected


def test_chunks_end_with_sentences_and_are_of_about_equal_length() -> None:
    text = SENTENCE * 23
    chunks = chunk_text(text, 100)
    assert [chunk.num_tokens for chunk in chunks] == [80, 80, 70]
    assert all(text[: chunk.end].endswith("tree. ") for chunk in chunks)


def test_the_end_of_a_paragraph_is_preferred() -> None:
    text = SENTENCE * 8 + "\n\n" + SENTENCE * 10
    first, second = chunk_text(text, 100)
    assert (first.num_tokens, second.num_tokens) == (80, 100)
    assert text[second.start :] == SENTENCE * 10


def test_a_sentence_longer_than_a_chunk_is_cut_inside() -> None:
    chunks = chunk_text("word " * 500, 40)
    assert sum(chunk.num_tokens for chunk in chunks) == 500
    assert max(chunk.num_tokens for chunk in chunks) <= 40


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ab. \n!?-#漢。", min_size=1, max_size=400), st.integers(1, 30))
def test_any_text_is_covered_without_gaps_and_no_chunk_is_too_long(text: str, most: int) -> None:
    chunks = chunk_text(text, most)
    assert "".join(text[chunk.start : chunk.end] for chunk in chunks) == text
    assert all(chunk.num_tokens <= most for chunk in chunks)
    assert sum(chunk.num_tokens for chunk in chunks) == len(TokenOffsets.of(text))


def test_a_chunk_without_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="a chunk of 0 tokens holds nothing"):
        chunk_text("a", 0)
