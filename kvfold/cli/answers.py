"""Ask a document questions under one policy, and measure: what `kvfold run` and `kvfold demo` are made of.

A question that is *known* is part of the compressed prompt, so the policy can look at what it needs: one prefill per
question. Otherwise the document is compressed once, blindly, and asked many times. Methods that look at the end of
the prompt differ a lot between the two, so every output says which of them it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfold.cli.show import prefill_bar
from kvfold.models.loader import Model
from kvfold.policy import Policy
from kvfold.session import Reply, Session
from kvfold.stats import Stats

Positions = list[list[list[int]]]  # by layer, head and slot


@dataclass(frozen=True)
class Answer:
    """One reply, with the sizes of the compressed prompt that it was given from."""

    policy: Policy
    question_known: bool
    question: str
    reply: Reply
    sizes: Stats
    positions: Positions
    is_first: bool  # of those that share one prefill


def answer_all(
    model: Model,
    policy: Policy,
    document: str,
    questions: Sequence[str],
    *,
    question_known: bool,
    options: dict[str, Any],
) -> list[Answer]:
    """One answer for each question."""
    if question_known:
        prompts = [f"{document}\n\n{question}" for question in questions]
        return [
            _known(model, policy, prompt, question, options)
            for prompt, question in zip(prompts, questions, strict=True)
        ]
    return _unknown(model, policy, document, questions, options)


def _known(model: Model, policy: Policy, prompt: str, question: str, options: dict[str, Any]) -> Answer:
    with Session(model, policy) as session:
        _read(session, prompt)
        sizes, positions = session.stats(), _positions(session)
        return Answer(policy, True, question, session.generate(**options), sizes, positions, True)


def _unknown(
    model: Model, policy: Policy, document: str, questions: Sequence[str], options: dict[str, Any]
) -> list[Answer]:
    with Session(model, policy) as session:
        _read(session, document)
        sizes, positions = session.stats(), _positions(session)
        replies = [session.ask(question, **options) for question in questions]
    return [
        Answer(policy, False, question, reply, sizes, positions, number == 0)
        for number, (question, reply) in enumerate(zip(questions, replies, strict=True))
    ]


def _read(session: Session, text: str) -> None:
    num_tokens = len(session.model.tokenizer(text)["input_ids"]) if text else 0
    with prefill_bar(session.policy.short, num_tokens) as progress:
        session.extend(text, progress=progress)


def _positions(session: Session) -> Positions:
    layers = session.model.spec.layers
    return [
        [session.cache.positions(index, head).tolist() for head in range(layer.num_kv_heads)]
        for index, layer in enumerate(layers)
    ]
