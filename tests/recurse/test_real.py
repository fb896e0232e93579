"""A pretrained model finds a fact in one of several parts, and quotes the sentence at its place."""

from __future__ import annotations

import kvfold
from kvfold.models.loader import Model
from kvfold.recurse.reader import read

FACT = "The code of the wine cellar is 4817."


def test_the_answer_is_found_with_its_place(smollm2: Model) -> None:
    text = kvfold.example_text()
    at = text.index(FACT)
    text = text[text.rindex(". ", 0, at - 400) + 2 : text.index(". ", at + 400) + 1]
    result = read(smollm2, text, "What is the code of the wine cellar?", chunk=100, max_new_tokens=16)
    assert sum(node.level == 1 for node in result.tree.walk()) >= 2
    assert "4817" in result.text and result.is_complete
    (quote, *_) = result.quotes
    assert text[quote.start : quote.end] == quote.text
    assert FACT in quote.text
