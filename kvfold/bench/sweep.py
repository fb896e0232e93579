"""Run every policy over a prompt: one prefill serves all policies, one batch decodes them all.

    known     | document question[:-1] |  compressed      question[-1] answer   kept whole
    unknown   | document |                compressed      question answer       kept whole

The last token of the question is always decoded over the compressed cache, so no token of an answer was chosen by
attention to the full prompt.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from kvfold.bench.countdown import Countdown
from kvfold.bench.needle import Needles, Prompt, score
from kvfold.bench.rows import MODES, Facts, Key, Mode, Row, RowFile
from kvfold.bench.shard import Shard
from kvfold.engine.runner import Runner
from kvfold.errors import SizeError
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.pages.compress import Compression
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.defaults import load_variants
from kvfold.policy.policy import Policy
from kvfold.policy.registry import terms
from kvfold.stats import measure

SIZES = ("2x", "4x", "8x")
WHOLE = ("full", "full + int4")  # nothing is evicted: no size
PRODUCTS = (
    "snapkv + ada",
    "keydiff + ada",
    "expected + ada",
    "keydiff + int4",
    "snapkv + ada + int4",
    "keydiff + ada + int4",
)
TOO_SMALL = "too small"


@dataclass(frozen=True)
class Job:
    """A policy without its size, the size ("": nothing is evicted), and whether the question is known."""

    policy: str
    size: str
    mode: Mode

    def parse(self) -> Policy:
        return Policy.parse(f"{self.policy} + {self.size}" if self.size else self.policy)


@dataclass
class _Lane:
    """One job's way through one prompt."""

    sequence: SequenceCache
    row: Row
    token_ids: list[int] = field(default_factory=list)


def scorers() -> tuple[str, ...]:
    """Every registered scorer that evicts and needs neither an argument nor training for the model."""
    load_variants()
    evicting = [term for term in terms("score") if not term.variant.keeps_all]
    complete = [term for term in evicting if all(map(_is_optional, term.arguments))]
    return tuple(term.name for term in complete if term.variant().needs.predictor is None)


def _is_optional(argument: dataclasses.Field[Any]) -> bool:
    return argument.default is not dataclasses.MISSING or argument.default_factory is not dataclasses.MISSING


def jobs(
    policies: Sequence[str] | None = None, sizes: Sequence[str] = SIZES, modes: Sequence[Mode] = MODES
) -> list[Job]:
    """The full cache, then each policy at each size; without `policies`, all scorers and some products of theirs."""
    whole = WHOLE if policies is None else WHOLE[:1]
    sized = (*scorers(), *PRODUCTS) if policies is None else policies
    choices = [(policy, "") for policy in whole] + [(policy, size) for policy in sized for size in sizes]
    return [Job(policy, size, mode) for policy, size in choices for mode in modes]


class Sweep:
    """Jobs over prompts of one model; a job that the model cannot run is refused at once."""

    def __init__(self, model: Model, facts: Facts, jobs: Iterable[Job]) -> None:
        self.model = model
        self.facts = facts
        self.runner = Runner(model.hf, model.spec, model.arena)
        self.policies = {job: job.parse() for job in jobs}
        for policy in self.policies.values():
            check_policy(policy, model.spec)

    def left(self, prompt: int, done: Set[Key]) -> list[Job]:
        """The jobs of a prompt whose rows are not there yet."""
        return [job for job in self.policies if (prompt, job.policy, job.size, job.mode) not in done]

    def run(self, prompt: Prompt, jobs: Sequence[Job]) -> list[Row]:
        """A row for every job. All memory is given back, however this ends."""
        with ExitStack() as held:
            lanes = [self._open(prompt, job, held) for job in jobs]
            able = [lane for lane in lanes if not lane.row.note]
            for mode in MODES:
                self._read(prompt, mode, [lane for lane in able if lane.row.mode == mode])
            self._decode(prompt, able)
            return [lane.row if lane.row.note else self._scored(prompt, lane) for lane in lanes]

    def _open(self, prompt: Prompt, job: Job, held: ExitStack) -> _Lane:
        row = Row(self.facts, prompt.index, prompt.task, job.policy, job.size, job.mode, prompt.expected)
        sequence = self.runner.new_sequence(self.policies[job])
        held.callback(sequence.release)
        try:  # the size alone is checked here: nothing has been read yet
            Compression(sequence, sequence.policy.prefill, len(_compressed(prompt, job.mode)))
        except SizeError:
            row = replace(row, note=TOO_SMALL)
        return _Lane(sequence, row)

    def _read(self, prompt: Prompt, mode: Mode, lanes: list[_Lane]) -> None:
        """All of the prompt but its last token, and the sizes after its compression."""
        if not lanes:
            return
        sequences = [lane.sequence for lane in lanes]
        self.runner.prefill_many(sequences, _compressed(prompt, mode))
        for lane in lanes:
            stats = measure(lane.sequence)
            slots = round(stats.mean_slots, 1)
            lane.row = replace(lane.row, bytes=stats.resident_bytes, full_bytes=stats.full_bytes, slots=slots)
        if mode == "unknown":
            self.runner.prefill(sequences, [prompt.question_ids[:-1]] * len(lanes), compress=False)

    def _decode(self, prompt: Prompt, lanes: Sequence[_Lane]) -> None:
        """Greedy. A lane ends with its tokens, at an end token, or when its score cannot rise any more."""
        live = list(lanes)
        for _ in range(prompt.max_new_tokens):
            if not live:
                return
            tokens = [(lane.token_ids or prompt.question_ids)[-1] for lane in live]
            logits_BV = self.runner.decode([lane.sequence for lane in live], tokens)
            for lane, token in zip(live, logits_BV.argmax(-1).tolist(), strict=True):
                lane.token_ids.append(token)
            live = [lane for lane in live if not self._is_over(prompt, lane)]

    def _is_over(self, prompt: Prompt, lane: _Lane) -> bool:
        ended = lane.token_ids[-1] in self.model.spec.eos_token_ids
        return ended or score(self._text(lane), prompt.expected) == 1.0

    def _text(self, lane: _Lane) -> str:
        return str(self.model.tokenizer.decode(lane.token_ids, skip_special_tokens=True))

    def _scored(self, prompt: Prompt, lane: _Lane) -> Row:
        answer = self._text(lane)
        return replace(lane.row, answer=answer.strip(), score=score(answer, prompt.expected))


def _compressed(prompt: Prompt, mode: Mode) -> list[int]:
    """The tokens a policy compresses."""
    return prompt.document_ids + prompt.question_ids[:-1] if mode == "known" else prompt.document_ids


def run_all(
    sweep: Sweep,
    needles: Needles,
    file: RowFile,
    num_prompts: int,
    deadline: float = math.inf,
    shard: Shard | None = None,
) -> bool:
    """Prompt after prompt of the shard, without what the file holds; False if time.monotonic() would pass the deadline.

    The rows of a prompt are written when all of its jobs are through.
    """
    mine = filter((shard or Shard()).takes, range(num_prompts))
    todo = [index for index in mine if sweep.left(index, file.done)]
    with Countdown(f"{sweep.facts.model} prompts", len(todo)) as countdown:
        for index in todo:
            if time.monotonic() + countdown.step_s > deadline:
                return False
            file.append(sweep.run(needles.prompt(index), sweep.left(index, file.done)))
            countdown.step()
    return True
