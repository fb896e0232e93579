"""Prompts as a turn of the model's chat template, and which model gets which prompts.

    | opening of the template, question | part | question, what to reply, close of the template |
    | shared by all calls               | one call                                              |

The instruction stands behind the part, next to the reply. Instruct models follow it there; models below half a billion
parameters copy the form of examples instead (prompts.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvfold.errors import InputError, ModelError
from kvfold.models.chat_template import ChatTemplate
from kvfold.models.loader import Model
from kvfold.recurse.prompts import NOTHING, Reading

PromptStyle = Literal["auto", "chat", "plain"]
STYLES: tuple[PromptStyle, ...] = ("auto", "chat", "plain")
MIN_CHAT_PARAMETERS = 500_000_000
_RULE = (
    f"If the text does not answer the question, reply: {NOTHING}. "
    "Otherwise answer it in a few words copied from the text."
)


@dataclass(frozen=True)
class ChatReading(Reading):
    """The prompts of one question for a model that follows instructions."""

    template: Literal["auto"] | None = "auto"
    declines: tuple[str, ...] = ("nothing", "Nothing", "no", "No", "none", "None")

    @property
    def prefix(self) -> str:
        return f'Question: {self.question}\n\n{self.header}Text: """'

    @property
    def ending(self) -> str:
        return f'"""\n\nQuestion: {self.question}\n{_RULE}'


def make_reading(model: Model, style: PromptStyle, question: str, header: str, max_new_tokens: int) -> Reading:
    """Prompts of a style for a model; "auto" is "chat" for instruct models from half a billion parameters on."""
    if style not in STYLES:
        raise InputError(f"prompts are {style!r}; write one of {', '.join(STYLES)}")
    if style == "auto":
        style = "chat" if _follows_instructions(model) else "plain"
    if style == "plain":
        return Reading(question, header, max_new_tokens)
    if ChatTemplate.of(model.tokenizer) is None:
        raise InputError(f'{model.name} has no chat template; use prompts "plain"')
    return ChatReading(question, header, max_new_tokens)


def _follows_instructions(model: Model) -> bool:
    try:
        has_template = ChatTemplate.of(model.tokenizer) is not None
    except ModelError:  # one that cannot be cut into turns
        return False
    return has_template and sum(weight.numel() for weight in model.hf.parameters()) >= MIN_CHAT_PARAMETERS
