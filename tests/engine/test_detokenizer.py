"""Text of tokens as they come: whole characters, each once, and where each token ends."""

from __future__ import annotations

import pytest

from kvfold.engine.detokenizer import Detokenizer
from tests.tiny import prompt, tokenizer


def stream_of(text: str) -> tuple[Detokenizer, list[str]]:
    stream, seen = Detokenizer(tokenizer()), []
    for token in tokenizer()(text)["input_ids"]:
        stream.add(token)
        seen.append(stream.text)
    return stream, seen


def test_half_a_character_waits() -> None:
    _, seen = stream_of("a€é!")
    assert seen == ["a", "a", "a", "a€", "a€", "a€é", "a€é!"]


def test_tokens_end_where_their_characters_do() -> None:
    stream, _ = stream_of("the €x")
    assert [tokenizer().decode(t) for t in tokenizer()("the")["input_ids"]] == ["th", "e"]
    assert stream.ends == [2, 3, 4, 5, 5, 5, 6]
    assert [stream.tokens_within(n) for n in range(7)] == [0, 0, 1, 2, 3, 6, 7]


def test_what_stays_half_is_shown_at_the_end() -> None:
    stream = Detokenizer(tokenizer())
    for token in tokenizer()("a€")["input_ids"][:-1]:
        stream.add(token)
    assert stream.text == "a"
    stream.finish()
    assert stream.text.startswith("a\ufffd") and len(stream.ends) == 3


@pytest.mark.parametrize("seed", range(5))
def test_stream_is_the_whole_decoded(seed: int) -> None:
    """Random bytes, most of them no characters."""
    ids, stream = prompt(80, seed=seed), Detokenizer(tokenizer())
    for token in ids:
        before = stream.text
        stream.add(token)
        assert stream.text.startswith(before)
    stream.finish()
    assert stream.text == tokenizer().decode(ids)
    assert len(stream.ends) == len(ids) and stream.ends == sorted(stream.ends)
