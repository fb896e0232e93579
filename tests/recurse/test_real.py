"""A pretrained model finds a fact in one of several parts, and quotes the sentence at its place."""

from __future__ import annotations

from kvfold.models.loader import Model
from kvfold.recurse.reader import read
from tests.recurse.texts import FACT, QUESTION, document


def test_the_answer_is_found_with_its_place(smollm2: Model) -> None:
    text = document(18)
    result = read(smollm2, text, QUESTION, "snapkv + ada + 2x", chunk=110, max_new_tokens=16)
    assert len([node for node in result.tree.walk() if node.level == 1]) >= 2
    assert "3756" in result.text and result.is_complete
    (quote, *_) = result.quotes
    assert text[quote.start : quote.end] == quote.text == FACT
