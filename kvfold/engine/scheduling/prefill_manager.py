"""The scheduler's chunked prefill: which prompt runs its next chunk, and when decoding has a turn again.

A time slice between two decode steps bounds the inter-token latency while long prompts prefill. Tenants share prefill
time equally (queues.py). A prompt that is not done pauses between two layers until its next turn, and one that runs out
of pages waits for pages of decoding tasks. Short prompts run together in one pass, which does not pause: on a GPU it
takes little longer than one of them alone; on a CPU, where a pass has at most a chunk of tokens, less than all of them
one after another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch

from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.jobs import Job
from kvfold.engine.scheduling.queues import FairShare, Queues, is_over
from kvfold.engine.scheduling.task import Task
from kvfold.errors import OutOfPages, PrefixLost, TooLarge

_SHARE = 4  # prefill time over decode-step time: a fifth of the time goes to decoding
_LEAST_S, _MOST_S = 0.02, 1.0
_DEPTH = 2  # parts of a pass that may be queued on the GPU when the clock is read


class TimeSlice:
    """A slice is four times as long as the last step took, within 0.02 and 1 s. `fixed_s` overrides it."""

    def __init__(self, clock: Callable[[], float], device: torch.device, fixed_s: float | None = None) -> None:
        self._clock = clock
        self._is_cuda = device.type == "cuda"
        self._fixed_s = fixed_s
        self._step_s = 0.05
        self._end = 0.0
        self._queued: deque[torch.cuda.Event] = deque()

    @property
    def length_s(self) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        return min(max(_SHARE * self._step_s, _LEAST_S), _MOST_S)

    def begin(self) -> None:
        self._end = self._clock() + self.length_s

    def stepped(self, seconds: float) -> None:
        """The last decode step took so long."""
        self._step_s = seconds

    def is_over(self) -> bool:
        """Asked after each part of a pass."""
        if self._is_cuda:
            self._follow_device()
        return self._clock() >= self._end

    def _follow_device(self) -> None:
        """Kernel launches return at once: wait for the device up to the last `_DEPTH` parts, which keep it busy."""
        event = torch.cuda.Event()
        event.record()
        self._queued.append(event)
        if len(self._queued) > _DEPTH:
            self._queued.popleft().synchronize()


_MIN_COST = 8  # a piece costs at least this fraction of a chunk: reading the weights takes as long as few tokens do
MOST_JOINED = 256  # prompts of one pass, for which what decodes waits


@dataclass
class PrefillManager:
    """`is_closed`: whether the scheduler is shutting down."""

    _runner: Runner
    _queues: Queues
    _slice: TimeSlice
    _clock: Callable[[], float]
    _is_closed: Callable[[], bool]
    _share: FairShare = field(default_factory=FairShare)

    def run(self, admit: Callable[[], None]) -> None:
        """Prefill for a time slice and at most a chunk of tokens in all, unless the first piece is longer; `admit` is
        called after each piece."""
        queues, budget, num_tokens = self._queues, self._runner.chunk_len, 0
        self._slice.begin()
        while ready := self._ready():
            task, began = self._share.next(ready), self._clock()
            batch = [task]
            try:
                length = task.next_len
                if num_tokens and num_tokens + length > budget:
                    return
                batch += self._mates(task, ready)
                num_tokens += max(sum(one.next_len for one in batch), budget // _MIN_COST)
                task.blocked_at = None
                if len(batch) > 1:
                    self._run_together(batch)
                else:
                    task.prefill(partial(self._is_due, task.job))
                    self._move(task)
            except OutOfPages as error:
                self._wait_or_fail(task, error)
                return
            except PrefixLost:
                self._restart(task)
            except Exception as error:
                queues.fail(task, error)
            finally:
                for one in batch:
                    self._share.charge(one.tenant, (self._clock() - began) / len(batch))
            admit()
            if self._has_others() and self._slice.is_over():
                return

    def _move(self, task: Task) -> None:
        """Behind the others that prefill, or to those that decode."""
        is_prefilling = task.is_prefilling
        self._queues.prefilling.remove(task)
        (self._queues.prefilling if is_prefilling else self._queues.decoding).append(task)

    def _mates(self, task: Task, ready: Sequence[Task]) -> list[Task]:
        """Tasks whose next chunk runs in the same pass."""
        most = self._runner.joined_len // _MIN_COST
        if not task.can_join(most):
            return []
        compresses = task.compresses_next
        found = [other for other in ready if other is not task and other.can_join(most)]
        mates = [other for other in found if other.compresses_next == compresses]
        num_tokens = accumulate((mate.next_len for mate in mates), initial=task.next_len)
        room = self._runner.pass_len
        if self._queues.decoding:  # a CPU takes time for every token
            room //= 2 if self._runner.arena.device.type == "cuda" else _MIN_COST
        return mates[: max(0, min(sum(upto <= room for upto in num_tokens), MOST_JOINED) - 1)]

    def _run_together(self, batch: Sequence[Task]) -> None:
        """If the pass raises, no task has changed, and each runs alone, where its own error is found."""
        sequences, tokens = [task.sequence for task in batch], [task.next_tokens() for task in batch]
        lens = list(map(len, tokens))
        try:
            logits_BV = self._runner.prefill(sequences, tokens, compress=batch[0].compresses_next)
        except Exception:
            for task in batch:
                task.runs_alone = True
            return
        for task, num_tokens, logits_V in zip(batch, lens, logits_BV, strict=True):
            try:
                task.prefilled(num_tokens, logits_V)
                self._move(task)
            except Exception as error:
                self._queues.fail(task, error)

    def _ready(self) -> list[Task]:
        """Prefilling tasks, without those that ran out of pages and for which none was freed since; while nothing
        decodes, these as well."""
        free = self._runner.arena.free_bytes
        prefilling = self._queues.prefilling
        found = [task for task in prefilling if task.blocked_at is None or free > task.blocked_at]
        return found if found or self._queues.decoding else list(prefilling)

    def _is_due(self, job: Job) -> bool:
        """Whether a prefill is to pause: its job has ended, or its time slice has and others wait."""
        if self._is_closed() or is_over(job, self._clock()):
            return True
        return self._has_others() and self._slice.is_over()

    def _has_others(self) -> bool:
        """Whether there is any job beside one prefilling task."""
        queues = self._queues
        return bool(queues.decoding or queues.preempted or queues.waiting) or len(queues.prefilling) > 1

    def _wait_or_fail(self, task: Task, error: OutOfPages) -> None:
        """Pages were evicted, or will be freed when others end; a task that is alone fails."""
        queues = self._queues
        if queues.evict_idle():
            return
        if queues.decoding:
            task.blocked_at = self._runner.arena.free_bytes
        elif len(queues.prefilling) > 1:
            queues.requeue(task)  # nothing decodes, and prompts block each other
        else:
            queues.fail(task, TooLarge(str(error)))

    def _restart(self, task: Task) -> None:
        """Its stored prefix turned out bad; it starts again without it."""
        try:
            task.job.source.lost()
        except Exception as error:
            self._queues.fail(task, error)
        else:
            self._queues.requeue(task)
