"""What a model is asked about a part of a text: few-shot, as plain text, with the question before and behind the part.

Small models follow an example's form, and hardly an instruction: SmolLM2-135M says "nothing here" and copies answers
after three examples in plain text, and does neither in its chat template. Everything up to the part is the same
for all calls of a question, so it is prefilled once and shared. The question behind the part lets scores that look at
the last tokens (SnapKV) see it.

A small model begins "nothing here" with about the same small probability whether or not a part has the answer. A wrong
answer of a part can still lose in a merge, a missed one is lost: so "nothing", "no" and "none" together need half of
the probability.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.recurse.calls import Calls, Prompt
from kvfold.text_io import is_utf8

MAX_QUESTION_CHARS = 4000
NOTHING = "nothing here"
STOP = ("\n",)
_TASK = f'Answer each question with a sentence of its text, or with "{NOTHING}" if the text does not say it.\n\n'
_EXAMPLES = (  # text, question, a sentence as reply
    (
        "The harbour was quiet in the morning. Mira keeps the spare keys in a green box. Rain fell all day.",
        "Where does Mira keep the spare keys?",
        "Mira keeps the spare keys in a green box.",
    ),
    (
        "The train to Bergen was late again, and nobody complained. The soup cost 12 crowns.",
        "Who repaired the clock?",
        NOTHING,
    ),
    (
        "Two cooks left in May. The budget of the kitchen was 4,300 crowns that year, less than planned. "
        "Olav's budget was 900 crowns.",
        "What was the budget of the kitchen?",
        "The budget of the kitchen was 4,300 crowns.",
    ),
)


@dataclass(frozen=True)
class Reading:
    """The prompts of one question; `header` tells facts about the whole text."""

    question: str
    header: str = ""
    max_new_tokens: int = 32
    template: Literal["auto"] | None = None  # of the calls
    declines: tuple[str, ...] = (" nothing", " Nothing", " no", " No", " none", " None")  # how they begin

    @property
    def prefix(self) -> str:
        """What all calls share."""
        shots = "".join(f"{_asked(question, text, question)} {reply}\n\n" for text, question, reply in _EXAMPLES)
        return f'{_TASK}{shots}Question: {self.question}\n{self.header}Text: """'

    @property
    def ending(self) -> str:
        """What stands behind each part."""
        return f'"""\nQuestion: {self.question}\nReply:'

    def calls(
        self,
        model: Model,
        policy: str | Policy = "full",
        *,
        width: int | None = None,
        speculate: bool | int = False,
        shares: bool = True,
    ) -> Calls:
        """Calls behind the shared prefix."""
        return Calls(
            model,
            policy,
            prefix=self.prefix,
            template=self.template,
            width=width,
            speculate=speculate,
            shares=shares,
        )

    def prompt(self, text: str) -> Prompt:
        """The call for one part. Quotes that would end it early are taken out."""
        asked = text.replace('"""', '"') + self.ending
        return Prompt(asked, max_new_tokens=self.max_new_tokens, stop=STOP, unlikely=self.declines)


def _asked(before: str, text: str, behind: str) -> str:
    return f'Question: {before}\nText: """{text}"""\nQuestion: {behind}\nReply:'


def check_question(question: str) -> None:
    """InputError if it is empty, no UTF-8, or too long to stand in every call."""
    if not question.strip():
        raise InputError("the question is empty; write one")
    if not is_utf8(question):
        raise InputError("the question has lone surrogates, which no tokenizer reads; decode it as UTF-8")
    if len(question) > MAX_QUESTION_CHARS:
        raise InputError(
            f"the question has {len(question):,} characters; it stands in every call, so at most "
            f"{MAX_QUESTION_CHARS:,} are allowed: put long texts into the file"
        )
