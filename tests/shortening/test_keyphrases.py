"""`keyphrases`: what the text is about comes first, leads stay, and the size holds."""

from __future__ import annotations

import pytest

import kvfold
from kvfold.shortening.keyphrases import keyphrases, phrases_in

TOPIC = "The tide mill of Carew grinds wheat. Its tide gates close at noon."
FILLER = "Some say that it was so. Others were there when they had been. What then came was over."


def test_what_recurs_is_a_phrase_and_function_words_are_none() -> None:
    sentences = [*(f"The tide mill number {n} is old." for n in range(6)), *(FILLER.split(". ") * 3)]
    found = keyphrases(sentences, 5)
    assert "tide mill" in found and not {"the", "they", "were"} & set(found)
    assert all(weight >= 0 for weight in found.values())
    assert phrases_in("A tide mill, and old wheat.") == {"tide", "mill", "tide mill", "old", "wheat", "old wheat"}


@pytest.mark.parametrize("times", [5, 10, 20])
def test_the_size_holds_and_spans_are_of_the_text(times: int) -> None:
    text = "\n\n".join(f"{FILLER} {TOPIC.replace('Carew', f'Carew {n}')} {FILLER}" for n in range(40))
    found = kvfold.shorten(text, f"{times}x", "keyphrases", keep="none")
    assert found.num_tokens <= -(-found.num_original_tokens // times)
    assert found.text == "".join(text[start:end] for start, end in found.spans)
    assert found.spans == kvfold.shorten(text, f"{times}x", "keyphrases", keep="none").spans


def test_sentences_of_the_topic_stay_before_filler() -> None:
    text = f"{TOPIC} " + " ".join(f"{FILLER} The tide mill stands at mile {n}." for n in range(12))
    found = kvfold.shorten(text, "5x", "keyphrases", keep="none").text
    assert found.count("tide mill") >= 3 * found.count("Others were there")


@pytest.mark.parametrize("text", ["", "a b c " * 2000, "你好。再见。" * 300])
def test_odd_texts(text: str) -> None:
    found = kvfold.shorten(text, "5x", "keyphrases", keep="none")
    assert found.num_tokens <= max(1, -(-found.num_original_tokens // 5))
