"""One context, many questions: the context is compressed once, and each question is answered from a fork of its cache.

    found = kvfold.answer(model, document, ["Who wrote this?", "When?"], "kvzip + global + 4x", tokenizer=tokenizer)
    print(found.texts, found.stats.ratio)

The same over a longer life, with more turns, forks and files, is `kvfold.Session`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Unpack

from torch import nn

from kvfold.engine.layer_major import Progress
from kvfold.errors import InputError, KvfoldWarning
from kvfold.models.loader import Model, wrap
from kvfold.policy.policy import Policy
from kvfold.reply import GenerateOptions, Reply, checked
from kvfold.session import Session
from kvfold.stats import Stats


@dataclass(frozen=True)
class Answers:
    """What was answered, and the size of the compressed context before the first question."""

    replies: list[Reply]  # one for each question, in their order
    stats: Stats

    @property
    def texts(self) -> list[str]:
        return [reply.text for reply in self.replies]


def answer(
    model: Any,
    context: str,
    questions: str | Sequence[str],
    policy: str | Policy = "full",
    *,
    tokenizer: Any = None,
    answer_prefix: str = "",
    max_new_tokens: int = 64,
    max_context_length: int | None = None,
    template: Literal["auto"] | None = "auto",
    progress: Progress | None = None,
    **options: Unpack[GenerateOptions],
) -> Answers:
    """Compress `context` once under `policy`, and answer each question from a fork of its cache.

    `model` is what `kvfold.load` returned, or a transformers module together with its `tokenizer`. Context and question
    are one user turn of the chat template, so both are plain text, not yet templated; `template=None` reads them as
    they are. Questions stay uncompressed and do not see each other. Answers begin with `answer_prefix`,
    which is not part of their text. A policy that shortens for a question (`shorten(rank, 4x)`) reads the context anew
    for each, and `stats` are those of the last one. Of a longer context the first `max_context_length` tokens are read.
    """
    asked = [questions] if isinstance(questions, str) else list(questions)
    if not asked or not all(isinstance(question, str) and question for question in asked):
        raise InputError("questions is a text, or a non-empty list of texts, none of them empty")
    if not isinstance(context, str):
        raise InputError(f"context is a text, not {type(context).__name__}; token ids go to kvfold.compress")
    checked(options)
    plan = Policy.parse(policy).shorten
    rounds = [[one] for one in asked] if plan is not None and plan.by.needs_question else [asked]
    replies: list[Reply] = []
    with _loaded(model, tokenizer) as found:
        for together in rounds:
            with Session(found, policy, template=template) as session:
                session.extend(context, max_tokens=max_context_length, question=together[0], progress=progress)
                if len(session.token_ids) == max_context_length:
                    _warn_of_a_cut(session, context, max_context_length)
                stats = session.stats()
                replies += [
                    session.ask(question, answer_prefix=answer_prefix, max_new_tokens=max_new_tokens, **options)
                    for question in together
                ]
    return Answers(replies, stats)


def _warn_of_a_cut(session: Session, context: str, num_read: int) -> None:
    num_tokens = len(session.conversation.text_ids(context, "start", ()))
    if num_tokens > num_read:
        text = f"the context has {num_tokens} tokens; the first {num_read} of them are read (max_context_length)"
        warnings.warn(text, KvfoldWarning, stacklevel=3)


@contextmanager
def _loaded(model: Any, tokenizer: Any) -> Iterator[Model]:
    """A transformers module is attached for as long as questions are answered."""
    if isinstance(model, Model):
        if tokenizer is not None and tokenizer is not model.tokenizer:
            raise InputError("the model was loaded with a tokenizer of its own; leave tokenizer out")
        yield model
        return
    if not isinstance(model, nn.Module) or tokenizer is None:
        raise InputError(
            "model is what kvfold.load returned, or a transformers module with tokenizer=…; "
            f"not {type(model).__name__}{' without a tokenizer' if tokenizer is None else ''}"
        )
    found = wrap(model, tokenizer)
    try:
        yield found
    finally:
        found.detach()
