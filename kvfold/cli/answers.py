"""Questions about a document under one policy, with sizes and times: the core of `kvfold run` and `kvfold demo`.

Question-aware (the question is *known*): it is part of the compressed prompt, with one prefill per question.
Question-agnostic: the document is compressed once, without the question, and asked many times. Scores that look at the
end of the prompt differ a lot between the two, so every output says which of them it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import kvfold
from kvfold.cli.show import prefill_bar
from kvfold.policy import Policy

Positions = list[list[list[int]]]  # by layer, head and slot


@dataclass(frozen=True)
class Answer:
    """One reply, with the sizes of the compressed prompt."""

    policy: Policy
    question_known: bool
    question: str
    reply: kvfold.Reply
    sizes: kvfold.Stats
    is_first: bool  # of those that share one prefill
    positions: Positions | None = None  # of the kept slots, where asked for


@dataclass(frozen=True)
class Asking:
    """Questions and generation options, for all policies."""

    questions: Sequence[str]
    question_known: bool
    options: dict[str, Any]  # of Session.generate
    with_positions: bool = False


def answer_all(model: kvfold.Model, policy: Policy, document: str, asking: Asking) -> list[Answer]:
    """One answer for each question."""
    if not asking.question_known:
        return _unknown(model, policy, document, asking)
    return [_known(model, policy, document, question, asking) for question in asking.questions]


def _known(model: kvfold.Model, policy: Policy, document: str, question: str, asking: Asking) -> Answer:
    with kvfold.Session(model, policy) as session:
        _read(session, f"{document}\n\n{question}")
        sizes, positions = session.stats(), _positions(session, asking)
        return Answer(policy, True, question, session.generate(**asking.options), sizes, True, positions)


def _unknown(model: kvfold.Model, policy: Policy, document: str, asking: Asking) -> list[Answer]:
    with kvfold.Session(model, policy) as session:
        _read(session, document)
        sizes, positions = session.stats(), _positions(session, asking)
        replies = [session.ask(question, **asking.options) for question in asking.questions]
    return [
        Answer(policy, False, question, reply, sizes, number == 0, positions)
        for number, (question, reply) in enumerate(zip(asking.questions, replies, strict=True))
    ]


def _read(session: kvfold.Session, text: str) -> None:
    num_tokens = len(session.model.tokenizer(text)["input_ids"]) if text else 0
    with prefill_bar(session.policy.short, num_tokens) as progress:
        session.extend(text, progress=progress)


def _positions(session: kvfold.Session, asking: Asking) -> Positions | None:
    if not asking.with_positions:
        return None
    heads = [range(layer.num_kv_heads) for layer in session.model.spec.layers]
    return [[session.kept(layer, head) for head in mine] for layer, mine in enumerate(heads)]
