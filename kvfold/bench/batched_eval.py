"""Batched evaluation of many policies over a few prompts: one prefill per prompt, one decode batch for all requests.

A *job* is a prompt, a mode and a policy; a *request* is its sequence and output. Samples that share their context share
its compressed cache too where compression is question-agnostic: it is prefilled once, and forked. On CUDA requests
decode through CUDA graphs, one per batch size and page layout, so requests are grouped by layout, and ended ones stay
in their group: a smaller batch would need another graph. Questions run through such graphs too, 8 tokens of all
requests at a time: one by one they would launch a thousand times as many kernels.

    B requests   V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from kvfold.bench.prompts import Prompt
from kvfold.bench.record import TOO_SMALL, Mode
from kvfold.compression.round import check_size
from kvfold.engine.runner import Runner
from kvfold.errors import SizeError
from kvfold.pages.arena import Arena
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.step import layout_of
from kvfold.policy.policy import Policy
from kvfold.stats import Stats, measure

_AT_ONCE = 8  # tokens of a question in a captured pass; the rest runs one by one, so two graphs serve all lengths


@dataclass(frozen=True)
class EvalJob:
    """One policy over one prompt."""

    prompt: Prompt
    mode: Mode
    policy: str  # with its size
    max_new_tokens: int
    compares: bool = False  # fidelity is measured
    diagnoses: bool = False  # a decode step is timed alone, and the kept slots are compared with an oracle
    num_bytes: int = field(default=0, compare=False)  # expected size of its cache

    @property
    def compressed(self) -> tuple[int, ...]:
        return self.prompt.compressed(self.mode)


@dataclass
class EvalRequest:
    """The sequence and output of one job."""

    job: EvalJob
    sequence: SequenceCache
    note: str = ""  # why it could not run
    stats: Stats | None = None  # after the compression
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False

    @property
    def rest(self) -> tuple[int, ...]:
        """Tokens that run over the compressed cache before the last token."""
        return self.job.prompt.rest(self.job.mode)

    @property
    def next_id(self) -> int:
        return (self.token_ids or [self.job.prompt.last_id])[-1]


class BatchedEval:
    """The requests of some jobs; a context manager that frees their pages on exit."""

    def __init__(self, runner: Runner, jobs: Iterable[EvalJob]) -> None:
        self.runner = runner
        self._held = ExitStack()
        self.all = [self._open(job) for job in jobs]

    def __enter__(self) -> BatchedEval:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def runnable(self) -> list[EvalRequest]:
        return [request for request in self.all if not request.note]

    def _open(self, job: EvalJob) -> EvalRequest:
        sequence = self._keep(self.runner.new_sequence(Policy.parse(job.policy)))
        try:  # the size alone is checked here: nothing has been read yet
            check_size(sequence, len(job.compressed))
        except SizeError:
            return EvalRequest(job, sequence, note=TOO_SMALL)
        return EvalRequest(job, sequence)

    def _keep(self, sequence: SequenceCache) -> SequenceCache:
        self._held.callback(sequence.release)
        return sequence

    def prefill(self, look: Callable[[EvalRequest], None] | None = None) -> None:
        """Run all of every prompt but its last token; `look` is called with each request after its compression."""
        for requests in grouped(self.runnable, lambda request: request.job.compressed):
            self._compress(requests, look)
        rest = [request for request in self.runnable if request.rest]
        captured = [
            request for request in rest if self.runner.graphs is not None and layout_of(request.sequence) is not None
        ]
        for requests in self._batches(captured):
            self._decode_rest(requests)
        plain = [request for request in rest if request not in captured]
        for requests in grouped(plain, lambda request: request.job.prompt):
            self.runner.prefill(
                [request.sequence for request in requests], [request.rest for request in requests], compress=False
            )

    def _decode_rest(self, requests: list[EvalRequest]) -> None:
        """Run the rest of the prompts as decode steps."""
        left = [(request.sequence, request.rest) for request in requests]
        while left:
            most = _AT_ONCE if max(len(rest) for _, rest in left) >= _AT_ONCE else 1
            takes = [min(most, len(rest), sequence.open.next_room) for sequence, rest in left]
            parts = [rest[:take] for (_, rest), take in zip(left, takes, strict=True)]
            for verified, take in zip(self.runner.verify([s for s, _ in left], parts), takes, strict=True):
                for _ in range(take):
                    verified.keep()
                verified.observe()
            after = [(sequence, rest[take:]) for (sequence, rest), take in zip(left, takes, strict=True)]
            left = [(sequence, rest) for sequence, rest in after if rest]

    def _compress(self, requests: list[EvalRequest], look: Callable[[EvalRequest], None] | None) -> None:
        """One pass for all policies; requests of the same policy fork one cache for different questions."""
        policies = grouped(requests, lambda request: request.job.policy)
        began = time.perf_counter()
        self.runner.prefill_many([same[0].sequence for same in policies], requests[0].job.compressed)
        self._wait()
        prefill_s = time.perf_counter() - began
        for same in policies:
            stats = measure(same[0].sequence)
            for request in same[1:]:
                request.sequence = self._keep(same[0].sequence.fork())
            for request in same:
                request.stats, request.prefill_s = stats, prefill_s
                if look is not None:
                    look(request)

    def fork(self, request: EvalRequest) -> SequenceCache:
        """A fork of the request's cache, freed on exit too."""
        return self._keep(request.sequence.fork())

    def decode(self, end_ids: frozenset[int]) -> None:
        """Greedy, until each request has `max_new_tokens` or an end token."""
        groups = self._batches(self.runnable)
        began = time.perf_counter()
        while groups:
            tokens = next_tokens(
                self.runner, [[(request.sequence, request.next_id) for request in group] for group in groups]
            )
            for request, token in zip((request for group in groups for request in group), tokens, strict=True):
                if not request.is_over:
                    request.first_token_s = request.first_token_s or time.perf_counter() - began
                    request.token_ids.append(token)
                    request.is_over = token in end_ids or len(request.token_ids) >= request.job.max_new_tokens
            groups = [group for group in map(self._left, groups) if group]

    def _left(self, group: list[EvalRequest]) -> list[EvalRequest]:
        live = [request for request in group if not request.is_over]
        return group if live and self.runner.graphs is not None else live

    def _batches(self, requests: list[EvalRequest]) -> list[list[EvalRequest]]:
        if self.runner.graphs is None:
            return [requests] if requests else []
        return grouped(requests, lambda request: id(layout_of(request.sequence)))

    def _wait(self) -> None:
        if self.runner.arena.device.type == "cuda":
            torch.cuda.synchronize(self.runner.arena.device)


def next_tokens(runner: Runner, batches: Sequence[Sequence[tuple[SequenceCache, int]]]) -> list[int]:
    """The argmax tokens after one step of every batch, with one host-device synchronisation."""
    found = []
    for batch in batches:
        sequences, tokens = zip(*batch, strict=True)
        found.append(runner.decode(sequences, tokens).argmax(-1))
    ids: list[int] = torch.cat(found).tolist()
    return ids


def grouped(requests: Iterable[EvalRequest], key: Callable[[EvalRequest], object]) -> list[list[EvalRequest]]:
    """Requests grouped by key, in order of first occurrence."""
    groups: dict[object, list[EvalRequest]] = {}
    for request in requests:
        groups.setdefault(key(request), []).append(request)
    return list(groups.values())


_USED = 0.9  # of the free bytes: expected bytes exclude decoded tokens, and come from another prompt
_Item = TypeVar("_Item")


def fitting_batches(items: Sequence[_Item], num_bytes: Callable[[_Item], int], arena: Arena) -> Iterator[list[_Item]]:
    """Consecutive batches of at least one item whose caches are expected to fit into free memory together."""
    room = _USED * arena.free_bytes
    run: list[_Item] = []
    taken = 0
    for item in items:
        if run and taken + num_bytes(item) > room:
            yield run
            run, taken = [], 0
        run.append(item)
        taken += num_bytes(item)
    if run:
        yield run
