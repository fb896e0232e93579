"""Incremental detokenizer, whole characters only, in O(1) per token, and stop-string matching in O(1) per character.

Under byte-level BPE (GPT-2, Llama 3, Qwen) a token is the same bytes wherever it stands: they are looked up and go
through an incremental UTF-8 decoder. Another tokenizer may write a token differently at the start of a text (a leading
space goes) and may split a character over tokens. There new tokens are decoded behind those decoded last, and are
withheld while the text ends in an incomplete character, U+FFFD. Stop strings are matched by Knuth-Morris-Pratt.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from bisect import bisect_right
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary, ref

from tokenizers import Tokenizer, decoders

_HALF = "\ufffd"
_LONGEST = 4  # bytes, and so tokens, of a UTF-8 character


class Detokenizer(ABC):
    """`text` grows by whole characters; `ends[i]` is its length after token i, for the tokens it covers."""

    def __init__(self) -> None:
        self.text = ""
        self.ends: list[int] = []

    @abstractmethod
    def add(self, token: int) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """No token follows: an incomplete character at the end becomes U+FFFD."""

    def tokens_within(self, num_chars: int) -> int:
        """How many tokens end at or before this many characters."""
        return bisect_right(self.ends, num_chars)


def detokenizer_of(tokenizer: Any) -> Detokenizer:
    """By bytes where the tokenizer is byte-level, else by decoding again."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_cleaned = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
    if isinstance(backend, Tokenizer) and type(backend.decoder) is decoders.ByteLevel and not is_cleaned:
        return ByteDetokenizer(backend)
    return ContextDetokenizer(tokenizer)


class TokenBytes(dict[int, bytes]):
    """Bytes of each token, as a byte-level decoder writes it; special and unknown tokens have none. It does not keep
    its tokenizer alive."""

    def __init__(self, backend: Tokenizer) -> None:
        added = backend.get_added_tokens_decoder()
        super().__init__({number: b"" for number, token in added.items() if token.special})
        self._backend = ref(backend)

    def __missing__(self, token: int) -> bytes:
        backend, byte_of = self._backend(), _byte_of()
        symbols = "" if backend is None else backend.id_to_token(token) or ""
        is_bytes = all(symbol in byte_of for symbol in symbols)
        found = bytes(byte_of[symbol] for symbol in symbols) if is_bytes else symbols.encode()
        self[token] = found
        return found


_known: WeakKeyDictionary[Tokenizer, TokenBytes] = WeakKeyDictionary()


def _token_bytes(backend: Tokenizer) -> TokenBytes:
    """One table for all replies of a tokenizer."""
    found = _known.get(backend)
    if found is None:
        found = _known[backend] = TokenBytes(backend)
    return found


@cache
def _byte_of() -> dict[str, int]:
    """The byte of each symbol in GPT-2's alphabet: printable bytes stand for themselves, others from U+0100 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


class ByteDetokenizer(Detokenizer):
    """Of byte-level tokens."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend, self._bytes = backend, _token_bytes(backend)  # the table asks it for tokens that are new
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_open = 0  # tokens whose last character is incomplete

    def add(self, token: int) -> None:
        new = self._bytes[token]
        if not self._num_open and new.isascii():
            self.text += new.decode("ascii")
            self.ends.append(len(self.text))
            return
        self._num_open += 1
        self.text += self._decoder.decode(new)
        if not self._decoder.getstate()[0]:
            self._close()

    def finish(self) -> None:
        if self._num_open:
            self.text += self._decoder.decode(b"", final=True)
            self._close()

    def _close(self) -> None:
        self.ends += [len(self.text)] * self._num_open
        self._num_open = 0


class ContextDetokenizer(Detokenizer):
    """Of tokens that are decoded behind those before them."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # first token decoded as context of the new ones

    def add(self, token: int) -> None:
        self._ids.append(token)
        self._grow(whole=len(self._ids) - len(self.ends) < _LONGEST)

    def finish(self) -> None:
        self._grow(whole=False)

    def _grow(self, *, whole: bool) -> None:
        done = len(self.ends)
        before = self._decode(self._ids[self._context : done])
        after = self._decode(self._ids[self._context :])
        if whole and after.endswith(_HALF):
            return
        self.text += after[len(before) :]
        self.ends += [len(self.text)] * (len(self._ids) - done)
        self._context = done

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class StopMatcher:
    """`matched`: length of the longest suffix of the text that is a proper prefix of the stop string."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def add(self, piece: str) -> int | None:
        """Index in the piece behind the first occurrence of the stop string; None if there is none."""
        for index, character in enumerate(piece):
            while self.matched and self.stop[self.matched] != character:
                self.matched = self._borders[self.matched - 1]
            if self.stop[self.matched] == character:
                self.matched += 1
            if self.matched == len(self.stop):
                self.matched = self._borders[-1]
                return index + 1
        return None


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of the text that is a proper prefix of the stop string."""
    matcher = StopMatcher(stop)
    matcher.add(text[max(0, len(text) - len(stop) + 1) :])
    return matcher.matched


@lru_cache(maxsize=64)
def _borders(stop: str) -> tuple[int, ...]:
    """The failure function: for each prefix, its longest proper prefix that is also its suffix."""
    found, length = [0], 0
    for character in stop[1:]:
        while length and stop[length] != character:
            length = found[length - 1]
        length += stop[length] == character
        found.append(length)
    return tuple(found)
