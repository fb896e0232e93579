"""Jobs in, outcomes out: reads, decodes and measures batches of jobs, and goes on where memory is short.

A batch holds what is expected to fit, and the full caches that its jobs are compared with. One that does not fit is
halved until it does; a job that does not fit by itself is an outcome too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.bench.extras import Choice, choices, fidelities, kept_masks, step_ms
from kvfold.bench.fidelity import Fidelity
from kvfold.bench.lanes import Job, Lane, Lanes, grouped
from kvfold.bench.record import OUT_OF_MEMORY
from kvfold.bench.room import in_room
from kvfold.bench.sizes import FULL
from kvfold.engine.runner import Runner
from kvfold.errors import OutOfPages
from kvfold.pages.sequence import SequenceCache
from kvfold.stats import Stats


@dataclass(frozen=True)
class Outcome:
    """What became of a job; without stats, `note` says why it could not run."""

    note: str = ""
    stats: Stats | None = None
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    token_ids: tuple[int, ...] = ()
    decode_ms: float | None = None
    fidelity: Fidelity | None = None
    choice: Choice | None = None


def answer(runner: Runner, jobs: Sequence[Job]) -> dict[Job, Outcome]:
    """An outcome for every job. All memory is given back, however this ends."""
    batches = in_room(jobs, lambda job: job.num_bytes, runner.arena)
    return {job: outcome for batch in batches for job, outcome in _answer(runner, batch, jobs).items()}


def _answer(runner: Runner, jobs: Sequence[Job], among: Sequence[Job]) -> dict[Job, Outcome]:
    full = _compared_with(jobs, among)
    try:
        outcomes = _Batch(runner, [*full, *jobs]).outcomes()
        return {job: outcomes[job] for job in jobs}
    except (OutOfPages, torch.OutOfMemoryError):
        pass  # gone on with below, where the exception does not hold on to what failed
    if len(jobs) > 1:
        half = len(jobs) // 2
        return _answer(runner, jobs[:half], among) | _answer(runner, jobs[half:], among)
    if full:
        return _answer(runner, jobs, jobs)  # an answer, if not how far it is from the full cache's
    return {jobs[0]: Outcome(OUT_OF_MEMORY)}


def _compared_with(jobs: Sequence[Job], among: Sequence[Job]) -> list[Job]:
    """The full caches that some of the jobs look at and none of them is."""
    looked_at = {(job.prompt, job.mode) for job in jobs if job.compares or job.diagnoses}
    full = (job for job in among if job.policy == FULL and (job.prompt, job.mode) in looked_at)
    return [job for job in full if job not in jobs]


class _Batch:
    """Jobs that are in memory together."""

    def __init__(self, runner: Runner, jobs: Sequence[Job]) -> None:
        self.runner = runner
        self.jobs = jobs
        self.masks: dict[Job, dict[int, Tensor]] = {}
        self.forks: dict[Job, SequenceCache] = {}
        self.fidelity: dict[Job, Fidelity] = {}
        self.choice: dict[Job, Choice] = {}

    def outcomes(self) -> dict[Job, Outcome]:
        with Lanes(self.runner, self.jobs) as lanes:
            lanes.read(self._look)
            self.forks = {lane.job: lanes.fork(lane) for lane in lanes.able if lane.job.compares}
            lanes.decode(self.runner.spec.eos_token_ids)
            for same in grouped(lanes.able, lambda lane: (lane.job.prompt, lane.job.mode)):
                self._compare(same)
            return {lane.job: self._outcome(lane) for lane in lanes.all}

    def _look(self, lane: Lane) -> None:
        if lane.job.diagnoses and lane.sequence.policy.prefill.evicts:
            self.masks[lane.job] = kept_masks(lane)

    def _compare(self, lanes: Sequence[Lane]) -> None:
        """With the full cache of the same prompt, where it is in memory too."""
        full = next((lane for lane in lanes if lane.job.policy == FULL), None)
        if full is None:
            return
        compared = [lane for lane in lanes if lane.job in self.forks]
        if full in compared:
            found = fidelities(self.runner, compared, [self.forks[lane.job] for lane in compared], full)
            self.fidelity |= {lane.job: each for lane, each in zip(compared, found, strict=True)}
        masks = {lane.job: self.masks[lane.job] for lane in lanes if lane.job in self.masks}
        if masks:
            self.choice |= choices(self.runner, masks, full)

    def _outcome(self, lane: Lane) -> Outcome:
        if lane.note:
            return Outcome(lane.note)
        decode_ms = step_ms(self.runner, lane) if lane.job.diagnoses else None
        return Outcome(
            stats=lane.stats,
            prefill_s=lane.prefill_s,
            first_token_s=lane.first_token_s,
            token_ids=tuple(lane.token_ids),
            decode_ms=decode_ms,
            fidelity=self.fidelity.get(lane.job),
            choice=self.choice.get(lane.job),
        )
