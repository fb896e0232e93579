"""`words`: whole words in the order of the text, nothing protected cut, within the target, whatever the text."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from kvfold.errors import PolicyError, SizeError
from kvfold.models.loader import Model
from kvfold.policy import Policy
from kvfold.shortening.loaded_model import LoadedModel
from kvfold.shortening.protected import protected_spans
from kvfold.shortening.shorten import Shortened, shorten_text
from kvfold.shortening.text import plan_of
from tests import tiny
from tests.shortening.texts import LOG, MARKDOWN, PROSE, texts

TINY = tiny.ready("llama")
TOLD = LoadedModel(TINY)


def shortened(text: str, to: str = "2x", by: str = "words", **options: Any) -> Shortened:
    plan = plan_of(by, to, options.pop("keep", "none"))
    return shorten_text(text, plan, tokenizer=TINY.tokenizer, model=TOLD, **options)


def cut(text: str) -> Shortened:
    """Half of a text; of one in which no word fits, nothing."""
    try:
        return shortened(text)
    except SizeError as error:
        assert "no unit of the text fits" in str(error)
        return Shortened("", (), text, 0, len(text))


@pytest.mark.parametrize("text", (LOG, "ab" * 300, "```\n" + "never closed\n" * 40), ids=("log", "word", "fence"))
def test_where_no_word_fits_the_size_is_told_into_which_one_does(text: str) -> None:
    with pytest.raises(SizeError, match="no unit of the text fits") as caught:
        shortened(text)
    found = re.search(r"or (\d+)tok$", str(caught.value))
    assert found is not None and shortened(text, f"{found[1]}tok").text.strip()


@settings(max_examples=25, deadline=None)
@given(texts(max_pieces=30))
def test_spans_of_the_text_in_order_within_the_target(text: str) -> None:
    found = cut(text)
    assert found.text == "".join(text[start:end] for start, end in found.spans)
    assert all(0 <= start < end <= len(text) for start, end in found.spans)
    assert all(end < start for (_, end), (start, _) in zip(found.spans, found.spans[1:], strict=False))
    assert found.num_tokens <= -(-found.num_original_tokens // 2) or not text.strip()
    assert TINY.arena.used_bytes == 0


@settings(max_examples=25, deadline=None)
@given(texts(max_pieces=30))
def test_no_protected_span_is_cut_in_two(text: str) -> None:
    found = cut(text)
    stays = np.zeros(len(text), dtype=bool)
    for start, end in found.spans:
        stays[start:end] = True
    for start, end in protected_spans(text):
        assert stays[start:end].all() or not stays[start:end].any()


def test_a_quote_over_two_sentences_stays_whole_or_goes() -> None:
    names = ("Ann", "Bob", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hal")
    quotes = [f'"{name} came at {number}. Then {name} went to the harbour."' for number, name in enumerate(names, 1)]
    text = " ".join(f"Somebody said this. {quote} It was heard." for quote in quotes)
    found = shortened(text).text
    parts = (
        (f"{name} came" in found, f"{name} went" in found, quote in found)
        for name, quote in zip(names, quotes, strict=True)
    )
    assert {sum(part) for part in parts} == {0, 3}


@pytest.mark.parametrize("to", ["2x", "4x"])
def test_words_are_not_split(to: str) -> None:
    found = shortened(PROSE, to)
    assert set(found.text.split()) <= set(PROSE.split())
    assert found.num_tokens > 0.9 * found.num_original_tokens / float(to[:-1])


def test_a_sentence_that_stays_keeps_its_negations_and_numbers() -> None:
    """At a target that every sentence fits, all of them do."""
    text = PROSE + "We never paid 42 km of fees. The Vega did not sail without it. "
    found = shortened(text, "1.3x")
    for word in ("never", "42 km", "not", "without"):
        assert word in found.text
    assert found.num_tokens < found.num_original_tokens


def test_what_must_stay_does_or_the_size_is_refused() -> None:
    found = shortened(MARKDOWN, "2x", keep="code, urls, ids")
    assert "```sh\npip install thing  # never as root\n\nthing --check\n```\n" in found.text
    assert "https://example.org/docs" in found.text and "X-42b7" in found.text
    with pytest.raises(SizeError, match=r"what must stay \(ids, urls, code\) is \d+ tokens, and of \d+ tokens \d+ may"):
        shortened(MARKDOWN, "20x", keep="code, urls, ids")


def test_code_rows_and_headings_stay_whole_or_go() -> None:
    for to in ("1.5x", "2x", "3x", "5x"):
        found = shortened(MARKDOWN, to).text
        for whole in ("pip install thing  # never as root\n\nthing --check", "| name | size |", "# Install"):
            words = re.findall(r"\w{4,}", whole)
            assert whole in found or not any(f"{word} " in found for word in words if MARKDOWN.count(word) == 1)


def test_words_of_the_highest_loss_stay() -> None:
    """One sentence, so that only words compete: the mean loss of those that stay is above that of the others."""
    text = "the lamp and the bell and the boat and the clock and the drum and the flag and the globe and the harp " * 3
    starts, loss = TOLD.losses(text)
    found = shortened(text, "3x", "words(first=3)")
    stays = np.zeros(len(text), dtype=bool)
    for start, end in found.spans:
        stays[start:end] = True
    assert loss[stays[starts]].mean() > loss[~stays[starts]].mean() + 0.5


def test_the_ends_of_a_message_stay_word_for_word() -> None:
    text = f"Read what follows.\n\n{PROSE}\n\nWhich ship left first?"
    found = shortened(text, "2x", keeps_ends=True)
    assert found.text.startswith("Read what follows.\n\n") and found.text.endswith("\n\nWhich ship left first?")


def test_a_model_with_another_first_window_gives_the_same_twice() -> None:
    told = LoadedModel(TINY, context_len=96)
    plan = plan_of("words", "3x", "none")
    first, second = (shorten_text(PROSE, plan, tokenizer=TINY.tokenizer, model=told) for _ in range(2))
    assert first.spans == second.spans and first.num_tokens <= -(-first.num_original_tokens // 3)


def test_a_first_stage_below_the_target_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"words: first is at least 1, not 0\.5"):
        Policy.parse("shorten(words(first=0.5), 4x)")


@pytest.mark.model
def test_a_real_model_drops_what_it_can_guess(smollm2: Model) -> None:
    plan = plan_of("words(first=3)", "2x", "none")
    found = shorten_text(PROSE, plan, tokenizer=smollm2.tokenizer, model=LoadedModel(smollm2)).text.split()
    easy = {"the", "of", "a", "to", "for", "in", "was", "has", "been", "It"}
    before, after = (sum(word in easy for word in words) / len(words) for words in (PROSE.split(), found))
    assert after < before / 2
    assert "not" in found and "Okafor" in found
