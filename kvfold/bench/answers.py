"""Runs jobs in batches that fit into memory: prefill, decode, diagnostics.

A batch holds the jobs expected to fit, and the full caches they are compared with. One that runs out of memory is
halved until it fits; a job that does not fit alone gets an out-of-memory outcome.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.bench.batched_eval import BatchedEval, EvalJob, EvalRequest, fitting_batches, grouped
from kvfold.bench.diagnostics import KeptSlots, fidelities, kept_masks, kept_slots, step_ms
from kvfold.bench.fidelity import Fidelity
from kvfold.bench.record import OUT_OF_MEMORY
from kvfold.bench.size_cache import FULL
from kvfold.engine.runner import Runner
from kvfold.errors import OutOfPages
from kvfold.pages.sequence import SequenceCache
from kvfold.stats import Stats


@dataclass(frozen=True)
class Outcome:
    """The result of a job; without stats, `note` says why it could not run."""

    note: str = ""
    stats: Stats | None = None
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    token_ids: tuple[int, ...] = ()
    decode_ms: float | None = None
    fidelity: Fidelity | None = None
    kept: KeptSlots | None = None


def answer(runner: Runner, jobs: Sequence[EvalJob]) -> dict[EvalJob, Outcome]:
    """An outcome for every job. All pages are freed, also if it raises."""
    batches = fitting_batches(jobs, lambda job: job.num_bytes, runner.arena)
    return {job: outcome for batch in batches for job, outcome in _answer(runner, batch, jobs).items()}


def _answer(runner: Runner, jobs: Sequence[EvalJob], among: Sequence[EvalJob]) -> dict[EvalJob, Outcome]:
    full = _compared_with(jobs, among)
    try:
        outcomes = _Batch(runner, [*full, *jobs]).outcomes()
        return {job: outcomes[job] for job in jobs}
    except (OutOfPages, torch.OutOfMemoryError):
        pass  # continued below, where no traceback keeps the failed batch alive
    if len(jobs) > 1:
        half = len(jobs) // 2
        return _answer(runner, jobs[:half], among) | _answer(runner, jobs[half:], among)
    if full:
        return _answer(runner, jobs, jobs)  # without the comparison to the full cache
    return {jobs[0]: Outcome(OUT_OF_MEMORY)}


def _compared_with(jobs: Sequence[EvalJob], among: Sequence[EvalJob]) -> list[EvalJob]:
    """Full-cache jobs that some of the jobs are compared with and that are not among them."""
    compared = {(job.prompt.original, job.mode) for job in jobs if job.compares or job.diagnoses}
    full = (job for job in among if _is_full(job) and (job.prompt, job.mode) in compared)
    return [job for job in full if job not in jobs]


def _is_full(job: EvalJob) -> bool:
    """Whether it is the full cache of an original prompt, which all others are compared with."""
    return job.policy == FULL and job.prompt.shortened_from is None


class _Batch:
    """Jobs whose caches are in memory together."""

    def __init__(self, runner: Runner, jobs: Sequence[EvalJob]) -> None:
        self.runner = runner
        self.jobs = jobs
        self.masks: dict[EvalJob, dict[int, Tensor]] = {}
        self.forks: dict[EvalJob, SequenceCache] = {}
        self.fidelity: dict[EvalJob, Fidelity] = {}
        self.kept: dict[EvalJob, KeptSlots] = {}

    def outcomes(self) -> dict[EvalJob, Outcome]:
        with BatchedEval(self.runner, self.jobs) as batch:
            batch.prefill(self._note_kept)
            self.forks = {request.job: batch.fork(request) for request in batch.runnable if request.job.compares}
            batch.decode(self.runner.spec.eos_token_ids)
            for same in grouped(batch.runnable, lambda request: (request.job.prompt.original, request.job.mode)):
                self._compare(same)
            return {request.job: self._outcome(request) for request in batch.all}

    def _note_kept(self, request: EvalRequest) -> None:
        is_whole = request.job.prompt.shortened_from is None  # slots of a shortened prompt are of other tokens
        if request.job.diagnoses and is_whole and request.sequence.policy.prefill.evicts:
            self.masks[request.job] = kept_masks(request)

    def _compare(self, requests: Sequence[EvalRequest]) -> None:
        """With the full cache of the same prompt, where it is in memory too."""
        full = next((request for request in requests if _is_full(request.job)), None)
        if full is None:
            return
        compared = [request for request in requests if request.job in self.forks]
        if full in compared:
            found = fidelities(self.runner, compared, [self.forks[request.job] for request in compared], full)
            self.fidelity |= {request.job: each for request, each in zip(compared, found, strict=True)}
        masks = {request.job: self.masks[request.job] for request in requests if request.job in self.masks}
        if masks:
            self.kept |= kept_slots(self.runner, masks, full)

    def _outcome(self, request: EvalRequest) -> Outcome:
        if request.note:
            return Outcome(request.note)
        decode_ms = step_ms(self.runner, request) if request.job.diagnoses else None
        return Outcome(
            stats=request.stats,
            prefill_s=request.prefill_s,
            first_token_s=request.first_token_s,
            token_ids=tuple(request.token_ids),
            decode_ms=decode_ms,
            fidelity=self.fidelity.get(request.job),
            kept=self.kept.get(request.job),
        )
