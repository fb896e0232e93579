"""Decode steps of all decoding tasks in one batch; preemption when pages run out, bisection when a step raises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvfold.engine.generate import Deliver, InFlightStep, can_decode_async, decode_async, decode_step
from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.prefill_manager import TimeSlice
from kvfold.engine.scheduling.queues import Queues
from kvfold.engine.scheduling.task import Task
from kvfold.errors import OutOfPages


@dataclass
class DecodeManager:
    """`num_preempted`: preemptions so far. `_flush` is called when listeners have been told of a step."""

    _runner: Runner
    _queues: Queues
    _slice: TimeSlice
    _clock: Callable[[], float]
    _flush: Callable[[], None]
    num_preempted: int = 0
    _in_flight: InFlightStep | None = None
    _stepped: set[Task] = field(default_factory=set)  # the batch of the last asynchronous step

    def reset(self) -> None:
        """Discard the step in flight."""
        self._in_flight, self._stepped = None, set()

    def run(self) -> None:
        """Sample one token of every decoding task, and run one step of those that continue."""
        queues = self._queues
        for task in list(queues.decoding):
            self._sample(task)
        self._flush()
        began = self._clock()
        batches: list[Sequence[Task]] = [self._batch()]
        while batches:
            decoding = set(queues.decoding)  # others were preempted or failed since
            batch = [task for task in batches.pop() if task in decoding]
            if batch:
                batches += self._try_step(batch)
        self._flush()  # of tasks that failed
        if queues.decoding:
            self._slice.stepped(self._clock() - began)

    def _sample(self, task: Task) -> None:
        try:
            if task.is_sampled or task.sample():  # a token sampled before waits for its step
                return
        except Exception as error:
            self._queues.fail(task, error)
        else:
            self._queues.remove(task)

    def _try_step(self, batch: Sequence[Task]) -> list[Sequence[Task]]:
        """Run one step of a batch; returns batches that are to be tried next, the last one first."""
        queues, lens = self._queues, [task.sequence.logical_len for task in batch]
        try:
            deliveries = self._step(batch)
        except OutOfPages as error:
            self._in_flight = None
            if not queues.evict_idle() and not self._preempt():
                self._cut(queues.decoding[-1], error)
            return [batch]
        except Exception as error:
            self._in_flight = None
            return self._bisect(batch, lens, error)
        for task, deliver in zip(batch, deliveries, strict=True):
            try:
                deliver()
            except Exception as error:
                queues.fail(task, error)
        return []

    def _cut(self, task: Task, error: OutOfPages) -> None:
        """A reply that is alone has filled the arena: it ends as at its length. Beside others it fails."""
        queues = self._queues
        if len(queues.decoding) > 1 or queues.prefilling:
            queues.fail(task, error)
            return
        queues.remove(task)
        try:
            task.cut()
        except Exception as raised:
            task.end("failed", raised)

    def _bisect(self, batch: Sequence[Task], lens: Sequence[int], error: Exception) -> list[Sequence[Task]]:
        """Halves of a batch whose step raised, without the tasks that cannot repeat it; a task that raises alone
        fails."""
        rest = [task for task, length in zip(batch, lens, strict=True) if task.can_retry(length)]
        for task in batch if len(batch) == 1 else set(batch).difference(rest):
            self._queues.fail(task, error)
        half = len(rest) // 2
        return [rest[half:], rest[:half]]

    def _batch(self) -> list[Task]:
        """All decoding tasks, or those of the step in flight: the others wait until it is over."""
        decoding = self._queues.decoding
        if self._in_flight is None or set(decoding) <= self._stepped:
            return list(decoding)
        return [task for task in decoding if task in self._stepped] or list(decoding)

    def _step(self, tasks: Sequence[Task]) -> Iterable[Deliver]:
        outputs, stepped = [task.output for task in tasks], set(tasks)
        is_known = self._in_flight is not None and stepped <= self._stepped  # all were found to be so for that step
        if is_known or all(
            output.is_greedy and can_decode_async(self._runner, output.request.sequence) for output in outputs
        ):
            if not is_known:
                self._in_flight = None  # a new task is not in the step in flight
            launches = len(tasks) == len(self._queues.decoding)
            deliveries, self._in_flight = decode_async(self._runner, outputs, self._in_flight, launches=launches)
            self._stepped = stepped
            return deliveries
        self._in_flight = None
        return decode_step(self._runner, outputs)

    def _preempt(self) -> bool:
        """Preempt a decoding task that can be, if another one stays: the newest of the tenant that runs the most. Its
        KV cache moves to the host."""
        queues = self._queues
        if len(queues.decoding) + len(queues.prefilling) < 2:
            return False
        num_running = Counter(task.tenant for task in queues.tasks)
        for task in sorted(reversed(queues.decoding), key=lambda task: -num_running[task.tenant]):
            try:
                if not task.can_preempt:
                    continue
                task.preempt()
            except Exception as error:
                queues.fail(task, error)  # which frees pages as well
            else:
                queues.remove(task)
                queues.preempted.append(task)
                self.num_preempted += 1
            return True
        return False
