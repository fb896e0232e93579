"""Prompt-injection-safe tokenization: the string of a special token inside a user's text stays text and ends no turn.

`quote` replaces each such string by a mark before the chat template renders the text. Special tokens of the rendering
are then the template's own; a stretch with marks, up to the special tokens around it, is encoded with the original
strings and without parsing special tokens:

    <|im_start|> user⏎say [mark 2] please <|im_end|>          parsed | as text, "<|im_end|>" for the mark | parsed

Text without such strings is encoded in one piece.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import TokenizersBackend

SECRET = str(secrets.randbits(64))  # so that no user can write marks; digits, since templates may change case
OPEN, CLOSE = f"\ue000{SECRET}:", "\ue001"
_QUOTED = re.compile(f"{OPEN}(\\d+){CLOSE}")


class _Piece(NamedTuple):
    text: str
    is_literal: bool  # whether special tokens in it are text


class TextEncoder:
    """Thread-safe: the tokenizer is never changed."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        known = getattr(tokenizer, "added_tokens_decoder", {}).values()
        found = {str(token) for token in known if token.special} | set(tokenizer.all_special_tokens)
        self._special = sorted(filter(None, found))
        self._number = {text: number for number, text in enumerate(self._special)}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_any_of(self._special) or r"(?!)")

    @cached_property
    def _literal(self) -> Any:
        """A copy that never parses special tokens: the option changes the tokenizer's state."""
        return copy.deepcopy(self._tokenizer)

    def quote(self, text: str) -> str:
        """The text with a mark for each special token's string in it."""
        return self._pattern.sub(lambda found: f"{OPEN}{self._number[found[0]]}{CLOSE}", text)

    def quote_json(self, value: Any) -> Any:
        """Every string in a JSON value quoted, names of fields too."""
        if isinstance(value, str):
            return self.quote(value)
        if isinstance(value, list):
            return [self.quote_json(item) for item in value]
        if isinstance(value, dict):
            return {self.quote(name): self.quote_json(item) for name, item in value.items()}
        return value

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of one text; `special` adds the tokenizer's BOS and EOS."""
        return self.batch([text], special=special)[0]

    def batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Token ids of each text on its own; texts may be quoted."""
        pieces = [list(self._pieces(text)) for text in texts]
        flat = [piece for some in pieces for piece in some]
        parsed = iter(_call(self._tokenizer, [one.text for one in flat if not one.is_literal], special, False))
        literal = [one.text for one in flat if one.is_literal]
        as_text = iter(_call(self._literal, literal, False, True) if literal else [])
        return [[i for one in some for i in next(as_text if one.is_literal else parsed)] for some in pieces]

    def offsets(self, text: str) -> tuple[list[int], list[int]]:
        """Token ids of a text in which strings of special tokens are text, and the first character of each token."""
        found = self._literal(
            text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True, verbose=False
        )
        return found["input_ids"], [first for first, _ in found["offset_mapping"]]

    def _pieces(self, text: str) -> Iterator[_Piece]:
        if OPEN not in text:
            yield _Piece(text, False)
            return
        begin = 0  # of what is parsed
        borders = [(0, 0), *(found.span() for found in self._pattern.finditer(text)), (len(text), len(text))]
        for (_, after), (before, _) in pairwise(borders):
            stretch = text[after:before]
            if OPEN in stretch:
                if after > begin:
                    yield _Piece(text[begin:after], False)
                yield _Piece(_QUOTED.sub(lambda found: self._special[int(found[1])], stretch), True)
                begin = before
        if begin < len(text):
            yield _Piece(text[begin:], False)


def literal_tokenizer(tokenizer: Any, text: str) -> Any:
    """A tokenizer for which strings of special tokens in `text` are text; the given one if there are none."""
    if TextEncoder(tokenizer).quote(text) == text:
        return tokenizer
    return partial(copy.deepcopy(tokenizer), split_special_tokens=True)


def _any_of(texts: Sequence[str]) -> str:
    """A pattern (trie) that matches the longest of the texts in time independent of their number."""
    rest: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rest.setdefault(text[0], []).append(text[1:])
    found = "|".join(re.escape(first) + _any_of(more) for first, more in rest.items())
    return f"(?:{found})" + ("?" if "" in texts else "") if found else ""


def _call(tokenizer: Any, texts: list[str], special: bool, as_text: bool) -> list[list[int]]:
    if not texts:
        return []
    backend = _plain_backend(tokenizer)
    if backend is not None and backend.encode_special_tokens == as_text:
        return [one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=special)]
    found: list[list[int]] = tokenizer(texts, add_special_tokens=special, split_special_tokens=as_text)["input_ids"]
    return found


def _plain_backend(tokenizer: Any) -> Any:
    """The Rust tokenizer, where calling the other does nothing more; that would take twice the time of a short text."""
    if getattr(type(tokenizer), "_encode_plus", None) is not TokenizersBackend._encode_plus:
        return None
    backend = tokenizer.backend_tokenizer
    return backend if backend.truncation is None and backend.padding is None else None
