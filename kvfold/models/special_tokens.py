"""From texts to token ids, where a special token's string in a user's text is text and ends no turn.

`quote` puts a mark in the place of each such string before the chat template sees the text. What is a special token in
the rendering is then the template's own; a stretch with marks, up to the special tokens around it, is encoded with the
strings themselves and without looking for special tokens:

    <|im_start|> user⏎say [mark 2] please <|im_end|>          parsed | as text, "<|im_end|>" for the mark | parsed

Text without such strings is encoded in one piece, as it always was.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

SECRET = str(secrets.randbits(64))  # nobody else can know, and so write, marks; digits have no case to be changed
OPEN, CLOSE = f"\ue000{SECRET}:", "\ue001"
_QUOTED = re.compile(f"{OPEN}(\\d+){CLOSE}")


class _Piece(NamedTuple):
    text: str
    is_literal: bool  # whether special tokens in it are text


class TextEncoder:
    """Encodes from any number of threads: nothing of the tokenizer is changed after it was made."""

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
        """A copy that never looks for special tokens: one that is told so by turns would be changed by turns."""
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
        """Of one text; with `special` also what the tokenizer puts around a whole prompt."""
        return self.batch([text], special=special)[0]

    def batch(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]:
        """Of each text, as if it were alone; may have been quoted."""
        pieces = [list(self._pieces(text)) for text in texts]
        flat = [piece for some in pieces for piece in some]
        parsed = iter(_call(self._tokenizer, [one.text for one in flat if not one.is_literal], special, False))
        literal = [one.text for one in flat if one.is_literal]
        as_text = iter(_call(self._literal, literal, False, True) if literal else [])
        return [[i for one in some for i in next(as_text if one.is_literal else parsed)] for some in pieces]

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


def _any_of(texts: Sequence[str]) -> str:
    """A pattern for the longest of them: a tree of characters, so that a place costs no more where there are many."""
    rest: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rest.setdefault(text[0], []).append(text[1:])
    found = "|".join(re.escape(first) + _any_of(more) for first, more in rest.items())
    return f"(?:{found})" + ("?" if "" in texts else "") if found else ""


def _call(tokenizer: Any, texts: list[str], special: bool, as_text: bool) -> list[list[int]]:
    if not texts:
        return []
    found: list[list[int]] = tokenizer(texts, add_special_tokens=special, split_special_tokens=as_text)["input_ids"]
    return found
