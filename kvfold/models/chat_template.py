"""A chat template, cut into the pieces that a growing conversation appends.

opening | user text | close | reply | end | reopen | user text | close | …
                                          header (a reply after complete turns)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from kvfold.errors import InputError, ModelError

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
