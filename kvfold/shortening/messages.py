"""Messages of a conversation, shortened one by one: a message is cut alike whatever comes behind it, so a longer
conversation begins with the same tokens and its prefix is found in the cache.

Texts of users and tools are shortened; a system prompt is instructions and a reply is the model's own, so both stay.
Of a text the first sentence and the end of its last paragraph stay, where instructions and questions stand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvfold.shortening.base import LanguageModel
from kvfold.shortening.shorten import Shorten, Shortened, end_text, shorten_text

_ROLES = ("user", "tool")


def shorten_messages(
    messages: Sequence[dict[str, Any]],
    plan: Shorten,
    *,
    question: str | None = None,
    tokenizer: Any = None,
    model: LanguageModel | None = None,
) -> tuple[list[dict[str, Any]], list[Shortened]]:
    """The messages with shorter texts, and what became of each; without a question the last text ends with it."""
    done: list[Shortened] = []
    if question is None and plan.by.needs_question:
        question = _question(messages)

    def shorter(text: str) -> str:
        done.append(
            shorten_text(
                text, plan, question=question, tokenizer=tokenizer, model=model, keeps_ends=True, may_stay=True
            )
        )
        return done[-1].text

    def rewritten(message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if message.get("role") not in _ROLES or not content:
            return message
        if isinstance(content, str):
            return {**message, "content": shorter(content)}
        return {
            **message,
            "content": [{**part, "text": shorter(part["text"])} if _is_text(part) else part for part in content],
        }

    return [rewritten(message) for message in messages], done


def _question(messages: Sequence[dict[str, Any]]) -> str | None:
    """The end of the last text of a user."""
    for message in reversed(messages):
        content = message.get("content") if message.get("role") == "user" else None
        texts = [content] if isinstance(content, str) else [part["text"] for part in content or () if _is_text(part)]
        if asked := [text for text in texts if text.strip()]:
            return end_text(asked[-1])
    return None


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"
