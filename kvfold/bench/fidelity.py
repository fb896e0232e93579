"""Fidelity of a compressed cache without a task: KL divergence, argmax agreement and bits along a reference answer.

Both caches run the same reference tokens (teacher forcing), so errors do not accumulate and rows stay comparable. With
p of the full cache and q of the policy after each token:

    KL(p || q) = sum p (log p - log q), in nats    bits lost = log2 p(next) - log2 q(next)    agreement: same argmax

Bits lost may be negative where a policy gives the reference a higher probability. KL cannot.

Self-study (arXiv:2506.06266) takes its references from generic questions, which the full cache answers greedily;
compression is then question-agnostic.

    T tokens of the reference   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.pages.sequence import SequenceCache
from kvfold.reply import Reply
from kvfold.session import Session


@dataclass(frozen=True)
class Fidelity:
    """Means over the tokens that were predicted."""

    num_tokens: int
    kl_nats: float
    agreement: float  # share of tokens with the same most likely one
    bits_lost: float  # per token of the reference


class PerToken(NamedTuple):
    """One value for each token."""

    kl_T: Tensor
    agrees_T: Tensor
    lost_T: Tensor  # nats

    def summary(self) -> Fidelity:
        kl, agreement, lost = (float(row_T.double().mean()) for row_T in self)
        return Fidelity(len(self.kl_T), kl, agreement, lost / math.log(2))


def measure(runner: Runner, full: SequenceCache, compressed: SequenceCache, tokens: Sequence[int]) -> Fidelity:
    """Feed all tokens but the last to both caches, which have read the same before; each predicts the one after it.

    As the first token give the last one of the prompt, left out when it was read: it sees what compression left. Both
    sequences grow; fork them first to keep them. Only one step's logits are held at a time.
    """
    if len(tokens) < 2:
        raise InputError(f"the reference has {len(tokens)} tokens; give 2 or more, each predicts the one after it")
    if full.logical_len != compressed.logical_len:
        read = f"{full.logical_len} and {compressed.logical_len} tokens"
        raise InputError(f"the caches have read {read}; compare caches that have read the same")
    steps = []
    for token, after in pairwise(tokens):
        logits_2V = runner.decode([full, compressed], [token, token])
        steps.append(per_token(logits_2V[:1], logits_2V[1:], [after]))
    return PerToken(*(torch.cat(parts) for parts in zip(*steps, strict=True))).summary()


def per_token(full_TV: Tensor, policy_TV: Tensor, next_ids: Sequence[int]) -> PerToken:
    """Row t of both predicts next_ids[t]; the rows need not be of one sequence."""
    full_TV, policy_TV = full_TV.float(), policy_TV.float()
    logp_TV, logq_TV = full_TV.log_softmax(-1), policy_TV.log_softmax(-1)
    p_TV = logp_TV.exp()
    terms_TV = (p_TV * (logp_TV - logq_TV)).masked_fill(p_TV == 0, 0.0)  # 0 log 0 = 0, where logits are -inf
    next_T1 = torch.tensor(next_ids, device=full_TV.device).unsqueeze(-1)
    lost_T1 = logp_TV.gather(-1, next_T1) - logq_TV.gather(-1, next_T1)
    return PerToken(terms_TV.sum(-1), full_TV.argmax(-1) == policy_TV.argmax(-1), lost_T1.squeeze(-1))


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
