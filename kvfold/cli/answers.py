"""Questions about a document under one policy, with sizes and times: the core of `kvfold run` and `kvfold demo`.

Question-aware (the question is *known*): it is part of the compressed prompt, with one prefill per question.
Question-agnostic: the document is compressed once, without the question, and asked many times. Scores that look at the
end of the prompt differ a lot between the two, so every output says which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import kvfold
from kvfold.cli.show import bar, waiting
from kvfold.policy import Policy

if TYPE_CHECKING:
    from kvfold.shortening.shorten import Shortened

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
    shortened: Shortened | None = None  # the document, where the policy shortens it


@dataclass(frozen=True)
class Asking:
    """Questions and generation options, for all policies."""

    questions: Sequence[str]
    question_known: bool
    options: dict[str, Any]  # of Session.generate
    with_positions: bool = False
    on_text: Callable[[str], None] | None = None  # called with text as it is generated; None: progress is shown


def prepare_kernels(model: kvfold.Model, policies: Iterable[Policy]) -> None:
    """Compile what the policies take, or read it from disk, so that no time that is told holds it."""
    from kvfold.engine.runner import Runner  # here: help comes without torch
    from kvfold.engine.warm_up import warm_up

    runner = Runner(model.hf, model.spec, model.arena, compile=model.compile)
    with waiting("prepare kernels, which the first run compiles for a minute or two"):
        for policy in policies:
            warm_up(runner, replace(policy, shorten=None), max_running=1)


def answer_all(model: kvfold.Model, policy: Policy, document: str, asking: Asking) -> Iterator[Answer]:
    """One answer for each question, as they come. Texts are shortened here, so that their sizes can be told."""
    from kvfold.shortening.loaded_model import judge
    from kvfold.shortening.shorten import shorten_text  # here: help comes without numpy

    plan, cache_policy = policy.shorten, replace(policy, shorten=None)
    is_apart = asking.question_known or (plan is not None and plan.by.needs_question)
    shortened: Shortened | None = None
    for questions in [[one] for one in asking.questions] if is_apart else [asking.questions]:
        if plan is not None and (shortened is None or plan.by.needs_question):
            with waiting(f"shorten, {policy.short}"):
                shortened = shorten_text(
                    document,
                    plan,
                    question=questions[0],
                    tokenizer=model.tokenizer,
                    model=judge(plan, model),
                    may_stay=True,
                )
        text = document if shortened is None else shortened.text
        with kvfold.Session(model, cache_policy) as session:
            text = f"{text}\n\n{questions[0]}" if asking.question_known else text
            sizes, positions = _read(session, text, asking)
            for number, question in enumerate(questions):
                with _generating(policy, asking) as options:
                    reply = session.generate(**options) if asking.question_known else session.ask(question, **options)
                first = number == 0
                yield Answer(policy, asking.question_known, question, reply, sizes, first, positions, shortened)


def _read(session: kvfold.Session, text: str, asking: Asking) -> tuple[kvfold.Stats, Positions | None]:
    """Prefill and compress; the sizes then, and the kept positions if they are asked for."""
    from kvfold.compression.round import check_size  # here: it imports torch

    num_tokens = len(session.conversation.text_ids(text, "start", []))
    check_size(session.cache, num_tokens)  # a session would leave a text whole that is too short for its ratio
    with bar(f"prefill, {session.policy.short}", num_tokens, "tokens") as progress:
        session.extend(text, progress=progress)
    if not asking.with_positions:
        return session.stats(), None
    heads = [range(layer.num_kv_heads) for layer in session.model.spec.layers]
    return session.stats(), [[session.kept(layer, head) for head in mine] for layer, mine in enumerate(heads)]


@contextmanager
def _generating(policy: Policy, asking: Asking) -> Iterator[dict[str, Any]]:
    """Options of `Session.generate` under which the text is shown as it comes, or else how much there is."""
    if asking.on_text is not None:
        yield {**asking.options, "on_text": asking.on_text}
        return
    with bar(f"answer, {policy.short}", asking.options["max_new_tokens"], "tokens at most") as advance:
        yield {**asking.options, "on_text": lambda _: advance(1)}
