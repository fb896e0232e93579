"""Run every policy over a prompt: one prefill serves all policies, one batch decodes them all.

    known     | document question[:-1] |  compressed      question[-1] answer   kept whole
    unknown   | document |                compressed      question answer       kept whole

The last token of the question is always decoded over the compressed cache, so no token of an answer was chosen by
attention to the full prompt. Jobs of a prompt run some at a time: memory does not grow with their number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from kvfold.bench import lanes
from kvfold.bench.answers import Outcome, answer
from kvfold.bench.countdown import Countdown
from kvfold.bench.needle import Needles, Prompt, score
from kvfold.bench.prompts import Prompt as Tokens
from kvfold.bench.rows import MODES, Facts, Key, Mode, Row, RowFile
from kvfold.bench.shard import Shard
from kvfold.engine.runner import Runner
from kvfold.errors import PolicyError
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy

_LANES = 32  # at once: enough to keep the overhead of a decode step small


@dataclass(frozen=True)
class Job:
    """A policy without its size, the size ("": it is complete), and whether the question is known."""

    policy: str
    size: str
    mode: Mode

    @property
    def text(self) -> str:
        return f"{self.policy} + {self.size}" if self.size else self.policy


def jobs(policies: Iterable[str], sizes: Sequence[str], modes: Sequence[Mode] = MODES) -> list[Job]:
    """The full cache, then each policy: those that are complete once, the others at each size. What is none is refused
    here."""
    choices = [("full", "")]
    for policy in dict.fromkeys(policies):
        choices += [(policy, "")] if _is_complete(policy, sizes) else [(policy, size) for size in sizes]
    return [Job(policy, size, mode) for policy, size in choices for mode in modes]


def _is_complete(policy: str, sizes: Sequence[str]) -> bool:
    try:
        Policy.parse(policy)
    except PolicyError:
        for size in sizes:
            Policy.parse(Job(policy, size, MODES[0]).text)
        return False
    return True


class Sweep:
    """Jobs over prompts of one model; a job that the model cannot run is refused at once."""

    def __init__(self, model: Model, facts: Facts, jobs: Iterable[Job]) -> None:
        self.model = model
        self.facts = facts
        self.runner = Runner(model.hf, model.spec, model.arena, compile=model.compile)
        self.jobs = list(jobs)
        for job in self.jobs:
            check_policy(Policy.parse(job.text), model.spec)

    def left(self, prompt: int, done: Set[Key]) -> list[Job]:
        """The jobs of a prompt whose rows are not there yet."""
        return [job for job in self.jobs if (prompt, job.policy, job.size, job.mode) not in done]

    def run(self, prompt: Prompt, jobs: Sequence[Job]) -> list[Row]:
        """A row for every job. All memory is given back, however this ends."""
        tokens = Tokens(tuple(prompt.document_ids), tuple(prompt.question_ids))
        wanted = [lanes.Job(tokens, job.mode, job.text, prompt.max_new_tokens) for job in jobs]
        outcomes = answer(self.runner, wanted)
        return [self._row(prompt, job, outcomes[each]) for job, each in zip(jobs, wanted, strict=True)]

    def _row(self, prompt: Prompt, job: Job, outcome: Outcome) -> Row:
        row = Row(self.facts, prompt.index, prompt.task, job.policy, job.size, job.mode, prompt.expected)
        if outcome.stats is None:
            return replace(row, note=outcome.note)
        text = str(self.model.tokenizer.decode(list(outcome.token_ids), skip_special_tokens=True))
        return replace(
            row,
            answer=text.strip(),
            score=score(text, row.expected),
            bytes=outcome.stats.resident_bytes,
            full_bytes=outcome.stats.full_bytes,
            slots=round(outcome.stats.mean_slots, 1),
        )


def run_all(
    sweep: Sweep,
    needles: Needles,
    file: RowFile,
    num_prompts: int,
    deadline: float = math.inf,
    shard: Shard | None = None,
) -> bool:
    """Prompt after prompt of the shard, without what the file holds; False if time.monotonic() would pass the deadline.

    Rows are written whenever some jobs of a prompt are through.
    """
    mine = filter((shard or Shard()).takes, range(num_prompts))
    todo = [index for index in mine if sweep.left(index, file.done)]
    with Countdown(f"{sweep.facts.model} prompts", len(todo)) as countdown:
        for index in todo:
            if time.monotonic() + countdown.step_s > deadline:
                return False
            prompt = needles.prompt(index)
            while left := sweep.left(index, file.done)[:_LANES]:
                file.append(sweep.run(prompt, left))
            countdown.step()
    return True
