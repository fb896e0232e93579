"""What is read: a text, where its parts come from, facts about it, and values that a question may name.

context = Context("…", metadata={"Title": "Harbour log"}, variables={"name": "Rosa"})
context.fill("What is {name}'s extension?")
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvfold.errors import InputError
from kvfold.text_io import is_utf8

_BETWEEN = "\n\n"  # the texts of two files
_NAME = re.compile(r"\{\{(\w+)\}\}|\{(\w+)\}")
MAX_METADATA_CHARS = 2000


@dataclass(frozen=True)
class Source:
    """A file of a context: characters `start` to `end` of the joined text."""

    name: str
    start: int
    end: int


@dataclass(frozen=True)
class Context:
    """A text to ask about. `metadata` stands above every part of it that a model reads; `{name}` in a question stands
    for the variable of that name, and `{{name}}` for the word in braces."""

    text: str = field(repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InputError(f"the text of a context is of type {type(self.text).__name__}; give a string")
        for name, found in (("metadata", self.metadata), ("variables", self.variables)):
            if not isinstance(found, Mapping) or not all(
                isinstance(one, str) for pair in found.items() for one in pair
            ):
                raise InputError(f"{name} of a context are a dict of strings by name; write numbers as strings")
        if not self.text.strip():
            raise InputError("the text of a context is empty; there is nothing to read")
        if not is_utf8(self.text + self.header):
            raise InputError("the text has lone surrogates, which no tokenizer reads; decode it as UTF-8")
        if len(self.header) > MAX_METADATA_CHARS:
            raise InputError(
                f"the metadata has {len(self.header)} characters; it stands above every part of the text, so at most "
                f"{MAX_METADATA_CHARS} are allowed"
            )

    @classmethod
    def of_files(cls, texts: Sequence[tuple[str, str]]) -> Context:
        """(name, text) of one or more files, as one text."""
        sources, at = [], 0
        for name, text in texts:
            sources.append(Source(name, at, at + len(text)))
            at += len(text) + len(_BETWEEN)
        return cls(_BETWEEN.join(text for _, text in texts), sources=tuple(sources))

    @property
    def header(self) -> str:
        """The metadata as lines."""
        return "".join(f"{name}: {value}\n" for name, value in self.metadata.items())

    @property
    def digest(self) -> str:
        """SHA-256 of the text and the metadata."""
        return hashlib.sha256(f"{self.header}\0{self.text}".encode()).hexdigest()

    def fill(self, question: str) -> str:
        """The question with the values of variables in the place of their names; InputError for a name without a
        value."""
        return _NAME.sub(self._value, question)

    def _value(self, match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"{{{match[1]}}}"
        name = match[2]
        if name not in self.variables:
            known = f"variables: {', '.join(self.variables)}" if self.variables else "there are no variables"
            raise InputError(
                f"the question names {{{name}}}, which is no variable of the context ({known}); write {{{{{name}}}}} "
                "for the word in braces"
            )
        return self.variables[name]

    def place(self, start: int) -> tuple[str | None, int]:
        """(file, offset in it) of a character of the joined text; without files, the offset as it is."""
        if not self.sources:
            return None, start
        at = max(0, bisect_right([source.start for source in self.sources], start) - 1)
        return self.sources[at].name, start - self.sources[at].start
