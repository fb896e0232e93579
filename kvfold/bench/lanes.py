"""Many policies over a few prompts: one prefill serves all policies of a prompt, one batch decodes all lanes.

A *job* is a prompt, a mode and a policy; a *lane* is its way through the model. Samples that share their context share
its compressed cache too where the question is unknown: it is read once, and forked. On a GPU lanes decode through
captured graphs, one for each number of lanes and layout of pages, so lanes are grouped by layout, and those that ended
stay in their group: a smaller batch would be another graph. Questions are read through such graphs too, a few tokens of
all lanes at a time: one by one, lanes would launch a thousand times as many kernels.

    B lanes   V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from kvfold.bench.prompts import Prompt
from kvfold.bench.record import TOO_SMALL, Mode
from kvfold.compress.round import CompressionRound
from kvfold.engine.runner import Runner
from kvfold.errors import SizeError
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.step import layout_of
from kvfold.policy.policy import Policy
from kvfold.stats import Stats, measure

_AT_ONCE = 8  # tokens of a question in a captured pass; what remains goes one by one: two graphs serve all lengths


@dataclass(frozen=True)
class Job:
    """One policy over one prompt."""

    prompt: Prompt
    mode: Mode
    policy: str  # with its size
    max_new_tokens: int
    compares: bool = False  # fidelity is measured
    diagnoses: bool = False  # a step is timed alone, and what was kept is looked at
    num_bytes: int = field(default=0, compare=False)  # that its cache is expected to take

    @property
    def compressed(self) -> tuple[int, ...]:
        return self.prompt.compressed(self.mode)


@dataclass
class Lane:
    """One job's way through the model."""

    job: Job
    sequence: SequenceCache
    note: str = ""  # why it could not run
    stats: Stats | None = None  # after the compression
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    token_ids: list[int] = field(default_factory=list)
    is_over: bool = False

    @property
    def rest(self) -> tuple[int, ...]:
        """What is read over the compressed cache before the last token."""
        return self.job.prompt.rest(self.job.mode)

    @property
    def next_id(self) -> int:
        return (self.token_ids or [self.job.prompt.last_id])[-1]


class Lanes:
    """The lanes of some jobs, open while this is used as a context manager; their memory is given back after it."""

    def __init__(self, runner: Runner, jobs: Iterable[Job]) -> None:
        self.runner = runner
        self._held = ExitStack()
        self.all = [self._open(job) for job in jobs]

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    @property
    def able(self) -> list[Lane]:
        return [lane for lane in self.all if not lane.note]

    def _open(self, job: Job) -> Lane:
        sequence = self._keep(self.runner.new_sequence(Policy.parse(job.policy)))
        try:  # the size alone is checked here: nothing has been read yet
            CompressionRound(sequence, sequence.policy.prefill, len(job.compressed))
        except SizeError:
            return Lane(job, sequence, note=TOO_SMALL)
        return Lane(job, sequence)

    def _keep(self, sequence: SequenceCache) -> SequenceCache:
        self._held.callback(sequence.release)
        return sequence

    def read(self, look: Callable[[Lane], None] | None = None) -> None:
        """All of every prompt but its last token; `look` sees each lane right after its compression."""
        for lanes in grouped(self.able, lambda lane: lane.job.compressed):
            self._compress(lanes, look)
        rest = [lane for lane in self.able if lane.rest]
        captured = [lane for lane in rest if self.runner.graphs is not None and layout_of(lane.sequence) is not None]
        for lanes in self._batches(captured):
            self._step_on(lanes)
        plain = [lane for lane in rest if lane not in captured]
        for lanes in grouped(plain, lambda lane: lane.job.prompt):
            self.runner.prefill([lane.sequence for lane in lanes], [lane.rest for lane in lanes], compress=False)

    def _step_on(self, lanes: list[Lane]) -> None:
        """Read what is left of the prompts as if it had been decoded."""
        left = [(lane.sequence, lane.rest) for lane in lanes]
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

    def _compress(self, lanes: list[Lane], look: Callable[[Lane], None] | None) -> None:
        """One pass for all policies; lanes of the same policy ask different questions about one cache."""
        policies = grouped(lanes, lambda lane: lane.job.policy)
        began = time.perf_counter()
        self.runner.prefill_many([same[0].sequence for same in policies], lanes[0].job.compressed)
        self._wait()
        prefill_s = time.perf_counter() - began
        for same in policies:
            stats = measure(same[0].sequence)
            for lane in same[1:]:
                lane.sequence = self._keep(same[0].sequence.fork())
            for lane in same:
                lane.stats, lane.prefill_s = stats, prefill_s
                if look is not None:
                    look(lane)

    def fork(self, lane: Lane) -> SequenceCache:
        """A second cache like the lane's."""
        return self._keep(lane.sequence.fork())

    def decode(self, end_ids: frozenset[int]) -> None:
        """Greedy, until each lane has its tokens or an end token."""
        groups = self._batches(self.able)
        began = time.perf_counter()
        while groups:
            tokens = next_tokens(self.runner, [[(lane.sequence, lane.next_id) for lane in group] for group in groups])
            for lane, token in zip((lane for group in groups for lane in group), tokens, strict=True):
                if not lane.is_over:
                    lane.first_token_s = lane.first_token_s or time.perf_counter() - began
                    lane.token_ids.append(token)
                    lane.is_over = token in end_ids or len(lane.token_ids) >= lane.job.max_new_tokens
            groups = [group for group in map(self._left, groups) if group]

    def _left(self, group: list[Lane]) -> list[Lane]:
        live = [lane for lane in group if not lane.is_over]
        return group if live and self.runner.graphs is not None else live

    def _batches(self, lanes: list[Lane]) -> list[list[Lane]]:
        if self.runner.graphs is None:
            return [lanes] if lanes else []
        return grouped(lanes, lambda lane: id(layout_of(lane.sequence)))

    def _wait(self) -> None:
        if self.runner.arena.device.type == "cuda":
            torch.cuda.synchronize(self.runner.arena.device)


def next_tokens(runner: Runner, batches: Sequence[Sequence[tuple[SequenceCache, int]]]) -> list[int]:
    """The most likely tokens after one step of every batch; the device is waited for once."""
    found = []
    for batch in batches:
        sequences, tokens = zip(*batch, strict=True)
        found.append(runner.decode(sequences, tokens).argmax(-1))
    ids: list[int] = torch.cat(found).tolist()
    return ids


def grouped(lanes: Iterable[Lane], key: Callable[[Lane], object]) -> list[list[Lane]]:
    """Lanes of equal key together, in the order they came."""
    groups: dict[object, list[Lane]] = {}
    for lane in lanes:
        groups.setdefault(key(lane), []).append(lane)
    return list(groups.values())
