"""Text of tokens as they come: whole characters, each once, and where each token ends."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest

from kvfold.engine.detokenizer import ByteDetokenizer, ContextDetokenizer, Detokenizer, detokenizer_of
from tests.tiny import SPECIAL, VOCAB_SIZE, prompt, tokenizer

Make = Callable[[Any], Detokenizer]
both = pytest.mark.parametrize("make", [detokenizer_of, ContextDetokenizer], ids=["bytes", "context"])


def stream_of(text: str, make: Make) -> tuple[Detokenizer, list[str]]:
    stream, seen = make(tokenizer()), []
    for token in tokenizer()(text)["input_ids"]:
        stream.add(token)
        seen.append(stream.text)
    return stream, seen


def test_byte_level_tokens_are_looked_up() -> None:
    assert isinstance(detokenizer_of(tokenizer()), ByteDetokenizer)
    cleaning = tokenizer()
    cleaning.clean_up_tokenization_spaces = True  # which rewrites what tokens say
    assert isinstance(detokenizer_of(cleaning), ContextDetokenizer)


def test_every_token_is_written_as_the_tokenizer_writes_it() -> None:
    """Special tokens are left out, and an added one that is not special is text as it stands."""
    own = tokenizer()
    own.add_tokens(["<tool €>"])
    for token in range(VOCAB_SIZE + 1):
        stream = detokenizer_of(own)
        stream.add(token)
        stream.finish()
        assert stream.text == own.decode([token], skip_special_tokens=True)
    assert stream.text == "<tool €>"
    for name in SPECIAL:
        stream.add(own.convert_tokens_to_ids(name))
    assert stream.text == "<tool €>"


def test_a_tokenizer_that_was_used_is_freed() -> None:
    own = tokenizer()
    detokenizer_of(own).add(1)
    backend = ref(own.backend_tokenizer)
    del own
    gc.collect()
    assert backend() is None


@both
def test_half_a_character_waits(make: Make) -> None:
    _, seen = stream_of("a€é!", make)
    assert seen == ["a", "a", "a", "a€", "a€", "a€é", "a€é!"]


@both
def test_tokens_end_where_their_characters_do(make: Make) -> None:
    stream, _ = stream_of("the €x", make)
    assert [tokenizer().decode(t) for t in tokenizer()("the")["input_ids"]] == ["th", "e"]
    assert stream.ends == [2, 3, 4, 5, 5, 5, 6]
    assert [stream.tokens_within(n) for n in range(7)] == [0, 0, 1, 2, 3, 6, 7]


@both
def test_what_stays_half_is_shown_at_the_end(make: Make) -> None:
    stream = make(tokenizer())
    for token in tokenizer()("a€")["input_ids"][:-1]:
        stream.add(token)
    assert stream.text == "a"
    stream.finish()
    assert stream.text.startswith("a\ufffd") and len(stream.ends) == 3


@both
@pytest.mark.parametrize("seed", range(5))
def test_stream_is_the_whole_decoded(seed: int, make: Make) -> None:
    """Random bytes, most of them no characters."""
    ids, stream = prompt(80, seed=seed), make(tokenizer())
    for token in ids:
        before = stream.text
        stream.add(token)
        assert stream.text.startswith(before)
    stream.finish()
    assert stream.text == tokenizer().decode(ids)
    assert len(stream.ends) == len(ids) and stream.ends == sorted(stream.ends)
