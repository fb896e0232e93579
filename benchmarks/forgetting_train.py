"""Training and scoring of one arm: steps on answers, exact match, and curves of what is learnt and forgotten."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.forgetting_arms import FullLearner
from benchmarks.forgetting_facts import Facts, Rows, as_rows


@dataclass(frozen=True)
class Domain:
    """Facts as tokens: `told` is drawn from for batches, `asked` scores."""

    told: Rows
    asked: Rows

    @classmethod
    def of(cls, facts: Facts, tokenizer: object, device: torch.device) -> Domain:
        return cls(as_rows(facts.told, tokenizer, device), as_rows(facts.asked, tokenizer, device))

    def batch(self, size: int, generator: torch.Generator) -> Rows:
        drawn = torch.randperm(len(self.told.ids_BT), generator=generator)[:size].to(self.told.ids_BT.device)
        told = self.told
        return Rows(*(each[drawn] for each in (told.ids_BT, told.mask_BT, told.answer_BT, told.next_BT)))


@dataclass
class Curve:
    """Shares of A and B that are answered after so many steps on B."""

    steps: list[int] = field(default_factory=list)
    a: list[float] = field(default_factory=list)
    b: list[float] = field(default_factory=list)
    seconds: float = 0.0


def answer_logits(learner: FullLearner, rows: Rows) -> Tensor:
    """[answer tokens of all rows, vocabulary]"""
    logits: Tensor = learner.hf.lm_head(learner.hidden(rows)[rows.answer_BT])
    return logits.float()


@torch.no_grad()
def exact_match(learner: FullLearner, rows: Rows) -> float:
    """The share of rows whose answer greedy decoding would write: each of its tokens is the likeliest next one."""
    is_best_BT = torch.ones_like(rows.answer_BT)
    is_best_BT[rows.answer_BT] = answer_logits(learner, rows).argmax(-1) == rows.next_BT[rows.answer_BT]
    return is_best_BT.all(1).float().mean().item()


def train_step(learner: FullLearner, optimizer: torch.optim.Optimizer, rows: Rows) -> None:
    loss = functional.cross_entropy(answer_logits(learner, rows), rows.next_BT[rows.answer_BT])
    optimizer.zero_grad()
    loss.backward()
    with learner.limited():
        optimizer.step()


def learn(
    learner: FullLearner,
    domain: Domain,
    rate: float,
    *,
    steps: int,
    every: int,
    batch: int,
    seed: int,
    old: Domain,
    until: float,
) -> Curve:
    """Train on `domain`, and score it (`b`) and `old` (`a`) every so many steps, until `until` of it is right."""
    optimizer = torch.optim.Adam(learner.trained, lr=rate)
    generator, curve, began = torch.Generator().manual_seed(seed), Curve(), time.perf_counter()
    for step in range(steps + 1):
        if step % every == 0 or step == steps:
            curve.steps.append(step)
            curve.b.append(round(exact_match(learner, domain.asked), 4))
            curve.a.append(round(exact_match(learner, old.asked), 4))
            if curve.b[-1] >= until:
                break
        if step < steps:
            train_step(learner, optimizer, domain.batch(batch, generator))
    curve.seconds = round(time.perf_counter() - began, 2)
    return curve


def forgetting_at(acquired: float, a_before: float, a: Sequence[float], b: Sequence[float]) -> float | None:
    """(A before - A after) / A before where the curve first reaches B = `acquired`, between its points on a line."""
    for index, now in enumerate(b):
        if now >= acquired:
            before = b[index - 1] if index else now
            share = (acquired - before) / (now - before) if now > before else 1.0
            after = a[index] if not index else a[index - 1] + share * (a[index] - a[index - 1])
            return (a_before - after) / a_before
    return None
