"""Words of facts that came one after another are those of all facts at once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvfold.memory.fact_words import FactWords
from kvfold.shortening.bm25 import bm25
from kvfold.shortening.word_index import WordIndex

TEXTS = st.lists(st.lists(st.sampled_from("a b c dogs dog e f".split()), max_size=6).map(" ".join), max_size=8)  # noqa: SIM905


@given(st.lists(TEXTS, max_size=4), st.lists(st.sampled_from(["a", "dog", "f", "unheard"]), max_size=4))
def test_an_index_that_grew_ranks_as_one_made_at_once(parts: list[list[str]], words: list[str]) -> None:
    grown = FactWords.empty()
    for part in parts:
        grown = grown.with_texts(part)
        bm25(grown, "a dog")  # what it keeps must not outlive it
    whole = WordIndex.of([text for part in parts for text in part])
    assert np.array_equal(bm25(grown, " ".join(words)), bm25(whole, " ".join(words)))
    held = [any(word in text.replace("dogs", "dog").split() for word in words) for part in parts for text in part]
    assert grown.holds_N(words).tolist() == held
