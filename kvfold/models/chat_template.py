"""A chat template, cut into the pieces that a growing conversation appends, and a conversation as token ids.

    opening | user text | close | reply | end | reopen | user text | close | …
                                              header (a reply after complete turns)

With a chat template, special tokens inside user texts are encoded as plain text; without one, texts are encoded as they
are.

    start ── text ──> user ── reply ──> reply ── text ──> user …        start ── messages ──> between
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from jinja2 import TemplateError

from kvfold.errors import InputError, ModelError
from kvfold.models.special_tokens import TextEncoder

_USER, _REPLY, _NEXT = "\u2402user\u2402", "\u2402reply\u2402", "\u2402next\u2402"


@dataclass(frozen=True)
class ChatTemplate:
    opening: str  # before the first user text, default system prompt included
    close: str  # from the end of a user text to where the reply starts
    header: str  # from the end of a complete turn to where the reply starts
    end: str  # from the end of a reply to the end of its turn
    reopen: str  # from the end of a turn to the next user text

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate | None:
        """None where the tokenizer has no template."""
        if getattr(tokenizer, "chat_template", None) is None:
            return None
        first, second = {"role": "user", "content": _USER}, {"role": "user", "content": _NEXT}
        reply = {"role": "assistant", "content": _REPLY}
        try:
            turn = _render(tokenizer, [first])
            asked = _render(tokenizer, [first], add_generation_prompt=True)
            replied = _render(tokenizer, [first, reply])
            again = _render(tokenizer, [first, reply, second])
            opening, tail = turn.split(_USER)
            close = asked.split(_USER)[1]
            end = replied.split(_REPLY)[1]
            between = again.split(_REPLY)[1].split(_NEXT)[0]
        except TemplateError as error:
            reason = f"the chat template cannot render a plain conversation: {error}"
            raise ModelError(f"{reason}; use template=None") from error
        except (ValueError, IndexError) as error:
            raise ModelError("the model's chat template does not keep texts whole; use template=None") from error
        if not close.startswith(tail) or not between.startswith(end):
            raise ModelError("the model's chat template rewrites earlier turns; use template=None")
        return cls(opening, close, close.removeprefix(tail), end, between.removeprefix(end))


def render_messages(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """Complete turns as text."""
    try:
        return _render(tokenizer, messages)
    except (TemplateError, TypeError, KeyError) as error:
        raise InputError(f"the chat template does not take these messages: {error}") from error


def _render(tokenizer: Any, messages: list[dict[str, Any]], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


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
