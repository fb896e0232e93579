"""A conversation as token ids: user texts and messages through the chat template, and the header of each reply.

With a chat template, special tokens inside user texts are encoded as plain text; without one, texts are encoded as they
are.

    start ── text ──> user ── reply ──> reply ── text ──> user …        start ── messages ──> between
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kvfold.errors import InputError, ModelError
from kvfold.models.chat_template import ChatTemplate, render_messages
from kvfold.models.special_tokens import TextEncoder

Turn = Literal["start", "user", "between", "reply"]


@dataclass(frozen=True)
class Conversation:
    """Token ids of texts, by what the conversation ended with last (`Turn`)."""

    tokenizer: Any
    template: ChatTemplate | None
    eos_token_ids: frozenset[int]

    @cached_property
    def _encoder(self) -> TextEncoder:
        return TextEncoder(self.tokenizer)

    @property
    def after_text(self) -> Turn:
        return "reply" if self.template is None else "user"

    def text_ids(self, text: str, turn: Turn, read: Sequence[int]) -> list[int]:
        """Tokens of a user's text after the tokens `read` so far."""
        if not text:
            raise InputError("there is nothing to read: the text is empty")
        if self.template is None:
            return self._encoder.ids(text, special=not read)
        before = {
            "start": self.template.opening,
            "user": "",
            "between": self.template.reopen,
            "reply": self.template.end + self.template.reopen,
        }[turn]
        ids = self._encoder.ids(before + self._encoder.quote(text))
        # A reply that ended with the end-of-turn token already holds the first token of what follows.
        ended = bool(read) and read[-1] in self.eos_token_ids
        return ids[1:] if ended and ids[:1] == [read[-1]] else ids

    def message_ids(self, messages: list[dict[str, Any]], turn: Turn) -> list[int]:
        """Tokens of complete turns."""
        if self.template is None:
            raise ModelError("there is no chat template; give text instead of messages")
        if turn != "start":
            raise InputError("messages start a conversation; continue this one with extend(text) or a new Session")
        return self._encoder.ids(render_messages(self.tokenizer, self._encoder.quote_json(messages)))

    def reply_ids(self, turn: Turn, prefix: str = "") -> list[int]:
        """Tokens that close the user's turn and open the reply, which begins with `prefix`; without a template, those
        of `prefix` alone."""
        header = ""
        if self.template is not None and turn not in ("start", "reply"):
            header = self.template.close if turn == "user" else self.template.header
        begun = prefix if self.template is None else self._encoder.quote(prefix)
        return self._encoder.ids(header + begun) if header + begun else []
