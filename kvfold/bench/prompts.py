"""Prompts as tokens: what a policy compresses, and what runs over the compressed cache.

    known     | opening context question close reply_prefix[:-1] |   compressed      [-1] answer      uncompressed
    unknown   | opening context |   compressed      question close reply_prefix answer                uncompressed

The tokens are the same in both modes: context and question are tokenized apart. Opening and close are those of the
model's chat template, where it has one and the sample does not ask for plain text.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvfold.bench.record import Mode, PromptRow
from kvfold.bench.workloads.base import BETWEEN, Sample
from kvfold.errors import InputError
from kvfold.models.chat_template import ChatTemplate

_EXCERPT = 300  # characters


@dataclass(frozen=True, eq=False)
class Prompt:
    """A sample as tokens; equal only to itself, so that it is a cheap key."""

    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]
    shortened_from: Prompt | None = None

    @property
    def original(self) -> Prompt:
        return self.shortened_from or self

    def compressed(self, mode: Mode) -> tuple[int, ...]:
        """The tokens a policy compresses."""
        return self.context_ids + self.question_ids[:-1] if mode == "known" else self.context_ids

    def rest(self, mode: Mode) -> tuple[int, ...]:
        """The uncompressed tokens before the last one."""
        return () if mode == "known" else self.question_ids[:-1]

    @property
    def last_id(self) -> int:
        """Always decoded over the compressed cache, so that no token of an answer saw the full prompt."""
        return self.question_ids[-1]

    @property
    def num_tokens(self) -> int:
        return len(self.context_ids) + len(self.question_ids)


@dataclass(frozen=True)
class PromptBuilder:
    """Tokenizes samples with a model's chat template."""

    tokenizer: Any

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return ChatTemplate.of(self.tokenizer)

    def count_tokens(self, text: str) -> int:
        return len(self._encode(text))

    def prompt(self, sample: Sample) -> Prompt:
        template = self._template if sample.facts.get("chat", True) else None
        opening, close = (template.opening, template.close) if template else ("", "")
        if template is None and sample.reply_prefix:
            close = BETWEEN
        context_ids = self._encode(opening + sample.context, special=template is None)
        question_ids = self._encode(sample.question + close + sample.reply_prefix)
        if not question_ids:  # plain text that is to be gone on with
            context_ids, question_ids = context_ids[:-1], context_ids[-1:]
        if not context_ids or not question_ids:
            raise InputError(f"sample {sample.index} of {sample.task} has no context to compress; take it out")
        return Prompt(tuple(context_ids), tuple(question_ids))

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return found


def prompt_row(workload: str, length: int, sample: Sample) -> PromptRow:
    """What a report shows of a sample, and what tells whether two runs asked the same."""
    context = sample.context
    digest = hashlib.sha256(context.encode()).hexdigest()
    ends = context[:_EXCERPT], context[-_EXCERPT:]
    return PromptRow(workload, sample.task, length, sample.index, sample.question, sample.answers, digest, *ends)
