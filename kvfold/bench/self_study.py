"""Fidelity of a compressed prompt on generic questions (self-study, arXiv:2506.06266).

The full cache answers each question greedily; then both caches run that answer, and their next-token distributions are
compared (bench/fidelity.py). Compression is question-agnostic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfold.bench.fidelity import Fidelity, measure
from kvfold.errors import InputError
from kvfold.reply import Reply
from kvfold.session import Session

QUESTIONS = (
    "Summarise the text above in a few sentences.",
    "List the most important facts of the text above, one per line.",
    "What must one do, and what must one not do, according to the text above?",
    "Quote the first and the last sentence of the text above.",
)


@dataclass(frozen=True)
class StudyResult:
    """One question, the full cache's answer, and the fidelity of the compressed cache along it."""

    question: str
    answer: str
    fidelity: Fidelity


def study(full: Session, compressed: Session, questions: Sequence[str], num_tokens: int) -> list[StudyResult]:
    """Both sessions have read the same; they stay as they are. Answers are at most `num_tokens` long."""
    if full.token_ids != compressed.token_ids:
        read = f"{len(full.token_ids)} and {len(compressed.token_ids)} tokens"
        raise InputError(f"the sessions have read {read} that differ; compare sessions that have read the same")
    return [_asked(full, compressed, question, num_tokens) for question in questions]


def _asked(full: Session, compressed: Session, question: str, num_tokens: int) -> StudyResult:
    with full.fork() as asked:
        reply: Reply = asked.extend(question, compress=False).generate(max_new_tokens=num_tokens)
    conversation = full.conversation
    opening = conversation.reply_ids(conversation.after_text)  # its last token predicts the first word of the reply
    with full.fork() as whole, compressed.fork() as part:
        for branch in (whole, part):
            branch.extend(question, compress=False)
            if opening[:-1]:
                branch.extend(opening[:-1], compress=False)
        tokens = [*opening[-1:], *reply.token_ids]
        return StudyResult(question, reply.text, measure(full.runner, whole.cache, part.cache, tokens))


def mean(studied: Sequence[StudyResult]) -> Fidelity:
    """Over the tokens of all answers."""
    total = sum(item.fidelity.num_tokens for item in studied)

    def over(name: str) -> float:
        return sum(item.fidelity.num_tokens * float(getattr(item.fidelity, name)) for item in studied) / total

    return Fidelity(total, over("kl_nats"), over("agreement"), over("bits_lost"))
