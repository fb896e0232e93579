"""Token ids of texts, word by word: a word is tokenized once and remembered.

The tokenizer of BERT splits at white space before anything else, so a text has the ids of its words one after another.
With another one, texts are tokenized as a whole.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from kvfold.shortening.embedders.files import tokenizer_of

_MAX_WORDS, _MAX_CHARS = 1 << 17, 64  # remembered, and of one that is


class _Known(dict[str, list[int]]):
    """Ids of the words seen so far."""

    def __init__(self, words: WordIds) -> None:
        super().__init__()
        self._words = words

    def __missing__(self, word: str) -> list[int]:
        ids = self._words.encode(word)
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

    def __post_init__(self) -> None:
        self._known = _Known(self)

    @classmethod
    def of(cls, folder: Path, content: bytes) -> WordIds:
        """By the content of a tokenizer.json."""
        tokenizer = tokenizer_of(folder, content)
        facts = json.loads(content)
        unknown = facts["model"].get("unk_token")
        unknown_id = facts["model"].get("unk_id") if unknown is None else tokenizer.token_to_id(unknown)
        return cls(tokenizer, unknown_id, (facts["pre_tokenizer"] or {}).get("type") == "BertPreTokenizer")

    @property
    def vocab_size(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def ids(self, text: str) -> list[int]:
        if not self.is_by_word:
            return self.encode(text)
        if len(self._known) > _MAX_WORDS:
            self._known = _Known(self)  # not cleared: another thread may be reading the old one
        return list(chain.from_iterable(map(self._known.__getitem__, text.split())))

    def encode(self, text: str) -> list[int]:
        """Ids by the tokenizer itself; lone surrogates, which it refuses, are question marks."""
        text = text.encode("utf-8", "replace").decode()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [token for token in ids if token != self.unknown]
