"""Token ids of texts, word by word: a word is looked up or tokenized once, and remembered.

The tokenizer of uncased BERT splits at white space and ASCII marks and takes lower case before anything else, so a text
has the ids of its words one after another. With another tokenizer, texts are tokenized as a whole.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvfold.shortening.embedders.files import tokenizer_of

_PIECE = re.compile(r"[0-9a-z]+|[^0-9a-z]")
_MAX_WORDS, _MAX_CHARS = 1 << 17, 64  # remembered, and of one that is


class _Known(dict[str, list[int]]):
    """Ids of the words seen so far."""

    def __init__(self, words: WordIds) -> None:
        super().__init__()
        self._words = words

    def __missing__(self, word: str) -> list[int]:
        ids = self._words.ids_of_word(word)
        if len(word) <= _MAX_CHARS:
            self[word] = ids
        return ids


@dataclass
class WordIds:
    """Ids of the known tokens of a text, without special ones."""

    tokenizer: Tokenizer = field(repr=False)
    unknown: int | None
    is_by_word: bool
    _known: _Known = field(init=False, repr=False)
    _vocab: dict[str, int] = field(init=False, repr=False)
    _model: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._known = _Known(self)
        self._vocab, self._model = self.tokenizer.get_vocab(), self.tokenizer.model

    @classmethod
    def of(cls, folder: Path, content: bytes) -> WordIds:
        """By the content of a tokenizer.json."""
        tokenizer = tokenizer_of(folder, content)
        facts = json.loads(content)
        unknown = facts["model"].get("unk_token")
        unknown_id = facts["model"].get("unk_id") if unknown is None else tokenizer.token_to_id(unknown)
        return cls(tokenizer, unknown_id, _is_uncased_bert(facts))

    @property
    def vocab_size(self) -> int:
        return len(self._vocab)

    def ids(self, text: str) -> list[int]:
        if not self.is_by_word:
            return self._encode(text)
        if len(self._known) > _MAX_WORDS:
            self._known = _Known(self)  # not cleared: another thread may be reading the old one
        return list(chain.from_iterable(map(self._known.__getitem__, text.split())))

    def ids_of_word(self, word: str) -> list[int]:
        """Ids of a run without white space; a word of the vocabulary is one token."""
        if not word.isascii() or not word.isprintable() or "[" in word:  # [SEP] and its like are tokens of their own
            return self._encode(word)
        word = word.lower()
        return self._piece(word) if word.isalnum() else [*chain.from_iterable(map(self._piece, _PIECE.findall(word)))]

    def _piece(self, piece: str) -> list[int]:
        """Ids of ASCII letters and digits, or of a mark."""
        token = self._vocab.get(piece)
        if token is not None:
            return [token]
        return [part.id for part in self._model.tokenize(piece) if part.id != self.unknown]

    def _encode(self, text: str) -> list[int]:
        """Ids by the tokenizer itself; lone surrogates, which it refuses, are question marks."""
        text = text.encode("utf-8", "replace").decode()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [token for token in ids if token != self.unknown]


def _is_uncased_bert(facts: dict[str, Any]) -> bool:
    kinds = [(facts.get(part) or {}).get("type") for part in ("model", "normalizer", "pre_tokenizer")]
    return kinds == ["WordPiece", "BertNormalizer", "BertPreTokenizer"] and bool(facts["normalizer"]["lowercase"])
