"""Continuous batching: one thread, which alone touches the model and its arena, serves many requests on one runner.

Each iteration resumes preempted tasks, admits waiting jobs (admission.py), runs chunked prefill for a time slice, at
most a chunk of tokens (prefill_manager.py), and one decode step of all decoding tasks (decode_manager.py). When a step
runs out of pages, a decoding task is preempted: its KV cache is swapped out to the host, and in again, bit for bit,
when there is room.

Isolation between tenants:

- Prompts of a tenant take no more than its share of the prefill time.
- A tenant that prefills nothing may start. Of the four prefill slots, long prompts take at most three: the last one is
  for prompts of a chunk or less.
- `num_reserved` slots stay free for tenants that run nothing.
- A job that has no room because of pages of its own tenant lets jobs of other tenants pass.
- The newest task of the tenant that runs the most is preempted. It resumes behind jobs of tenants that run nothing,
  unless its own tenant has no other task that runs on.

Guarantees when something raises:

- An exception in the work of one task (its source, its listener, prefill, sampling, preemption, resumption) fails that
  task alone. Its pages are freed, and its listener gets `Ended("failed")` once.
- A decode step runs many tasks in one pass, and an exception does not name one. The batch is bisected until those that
  fail alone are found; all others have their step. A task whose KV cache the failed pass has already changed cannot
  repeat the step and fails as well; a pass changes caches last.
- If the loop itself raises, every job fails and the loop restarts (`Supervisor`), at most 5 times a minute. Then the
  scheduler takes no more jobs and says so (`state`, `on_failure`).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from threading import Condition, Thread
from typing import Any, Literal

from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.admission import Admission
from kvfold.engine.scheduling.decode_manager import DecodeManager
from kvfold.engine.scheduling.jobs import Ended, Job
from kvfold.engine.scheduling.prefill_manager import MOST_JOINED, PrefillManager, TimeSlice
from kvfold.engine.scheduling.queues import Queues, is_over
from kvfold.errors import InputError, Overloaded
from kvfold.plurals import counted
from kvfold.policy.policy import Policy

MAX_RESTARTS = 5  # in a minute: a loop that raises more often will not recover
RESTART_DELAY_S = 0.2
_GATHER_S, _MOST_GATHER_S = 0.003, 0.25  # between two jobs; in all
_SECOND_S = 0.001  # on a GPU, for a second job
_log = logging.getLogger("kvfold.engine")

State = Literal["running", "restarting", "failed", "closed"]


@dataclass
class Supervisor:
    """Runs `loop` in a thread until it returns. After an exception `fail_all` ends every job with it, since the job
    that caused it may be among them. `on_failure` is called in the thread after the last restart. `changed` guards the
    state and is notified when it is closed."""

    _loop: Callable[[], None]
    _fail_all: Callable[[Exception], None]
    _on_failure: Callable[[], None]
    _changed: Condition
    is_closed: bool = False
    restarts: deque[float] = field(default_factory=partial(deque, maxlen=MAX_RESTARTS))  # times of the latest
    _state: State = "running"

    def __post_init__(self) -> None:
        self._thread = Thread(target=self._run, name="kvfold-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def state(self) -> State:
        if self.is_closed:
            return "closed"
        return self._state if self._thread.is_alive() else "failed"

    def require_open(self) -> None:
        """Overloaded if no job can be taken any more."""
        if self.is_closed:
            raise Overloaded("the server is shutting down; send the request to another one")
        if self._state == "failed":
            raise Overloaded("the server has failed and is about to end; send the request to another one")

    def close(self, timeout_s: float | None = None) -> bool:
        """Let the loop end and wait for the thread, at most so long; returns whether it has ended."""
        with self._changed:
            self.is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._state != "failed":
            try:
                self._loop()
                return
            except BaseException as error:
                _log.critical("the scheduler's loop raised; every request fails", exc_info=True)
                self._recover(error)

    def _recover(self, error: BaseException) -> None:
        now = time.monotonic()
        is_hopeless = len(self.restarts) == MAX_RESTARTS and now - self.restarts[0] < 60
        self.restarts.append(now)
        with self._changed:
            self._state = "failed" if is_hopeless else "restarting"
        self._fail_all(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        if is_hopeless:
            _log.critical("the scheduler's loop raised more than %d times in a minute; it is over", MAX_RESTARTS)
            self._on_failure()
            return
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed, RESTART_DELAY_S)
            self._state = "running"


class Scheduler:
    """`num_reserved`: running slots reserved for tenants that run nothing. `slice_s`: prefill time between two decode
    steps; None adapts to the duration of steps. `evict_idle` frees pages of an idle prefix and returns whether there
    was one. `on_failure` is called in the thread when the loop has failed for good. `flush` is called there once
    listeners have been told of a decode step or another change. While `takes_texts` is false, texts of streamed jobs
    wait for a later step: a listener gets those of several as one. `settle` waits, at most so many seconds, until what
    has reached the server so far is submitted."""

    def __init__(
        self,
        runner: Runner,
        policy: Policy,
        tokenizer: Any,
        *,
        max_running: int = 64,
        max_waiting: int = 256,
        num_reserved: int = 0,
        slice_s: float | None = None,
        evict_idle: Callable[[], bool] = lambda: False,
        on_failure: Callable[[], None] = lambda: None,
        flush: Callable[[], None] = lambda: None,
        takes_texts: Callable[[], bool] = lambda: True,
        settle: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_running < 1 or max_waiting < 1:
            raise InputError(f"max_running is {max_running}, max_waiting {max_waiting}; both must be at least 1")
        if not 0 <= num_reserved < max_running:
            raise InputError(
                f"num_reserved is {num_reserved}; it must be at least 0 and below max_running, {max_running}"
            )
        self.runner = runner
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.num_cancelled = 0  # before their end
        self._clock = clock
        self._numbers = count(1)
        self._flush_listeners, self._takes_texts, self._settle = flush, takes_texts, settle
        self._first_due = math.inf  # no job is past its deadline, or cancelled, before
        self._queues = Queues(evict_idle)
        self._changed = self._queues.changed
        self._supervisor = Supervisor(self._loop, self._fail_all, on_failure, self._changed)
        time_slice = TimeSlice(clock, runner.arena.device, slice_s)
        self._admission = Admission(runner, policy, tokenizer, self._queues, max_running, num_reserved)
        self._prefills = PrefillManager(runner, self._queues, time_slice, clock, lambda: self._supervisor.is_closed)
        self._decodes = DecodeManager(runner, self._queues, time_slice, clock, self._flush)
        self._supervisor.start()

    # From any thread

    def submit(self, job: Job) -> None:
        """Queue a job. Overloaded if too many wait, beside those for which there are places to run."""
        with self._changed:
            self._supervisor.require_open()
            num_waiting, num_free = self._queues.waiting.num_waiting, max(0, self.max_running - self.num_running)
            if num_waiting >= self.max_waiting + num_free:
                raise Overloaded(f"the queue has {counted(num_waiting, 'request')}; try again later")
            job.number = next(self._numbers)
            self._queues.waiting.push(job)
            self._first_due = min(self._first_due, _due_at(job))
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """The job ends before its next step; nothing happens if it has ended."""
        with self._changed:
            if job.has_ended:
                return
            job.is_cancelled = True
            self._first_due = -math.inf
            self._changed.notify()

    def close(self, timeout_s: float | None = None) -> bool:
        """End everything as cancelled and wait for the thread, at most so long; returns whether it has ended."""
        return self._supervisor.close(timeout_s)

    @property
    def state(self) -> State:
        """ "running" while jobs are processed."""
        return self._supervisor.state

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return self._queues.waiting.num_waiting

    @property
    def num_running(self) -> int:
        """Admitted jobs, preempted ones included."""
        return self._queues.num_running

    @property
    def num_preempted(self) -> int:
        """Preemptions so far."""
        return self._decodes.num_preempted

    # In the thread

    def _loop(self) -> None:
        while self._wait():
            self._end_overdue()
            self._admission.resume()
            self._admit()
            self._prefills.run(self._admit)
            self._decodes.run()
        self._queues.end_all("cancelled")
        self._flush()

    def _admit(self) -> None:
        self._admission.admit()
        self._flush()

    def _flush(self) -> None:
        """Tell listeners of texts, if they take any now, and flush."""
        if self._takes_texts():
            queues = self._queues
            for task in [*queues.decoding, *queues.preempted]:
                try:
                    task.tell()
                except Exception as error:
                    queues.fail(task, error)
        self._flush_listeners()

    def _wait(self) -> bool:
        """Until there is a job; False when the scheduler is closed."""
        with self._changed:
            was_idle = not self._queues.waiting and not self.num_running
            self._changed.wait_for(lambda: self._supervisor.is_closed or self._queues.waiting or self.num_running)
        if was_idle and self.runner.joined_len:
            self._gather()
        return not self._supervisor.is_closed

    def _gather(self) -> None:
        """While jobs arrive one right behind the other: their prompts are read together in less time than one by one.
        All wait for those that have reached the server and, for a moment, for one behind them: on a GPU, whose passes
        are short, no longer for a second job than `_SECOND_S`, and until they fill a pass."""
        known, until, is_cpu = 0, self._clock() + _MOST_GATHER_S, self.runner.arena.device.type == "cpu"
        while known < self.num_waiting < MOST_JOINED and not self._supervisor.is_closed:
            known, left_s = self.num_waiting, until - self._clock()
            if left_s <= 0 or (not is_cpu and self._fills_pass()):
                return
            self._settle(left_s)
            with self._changed:
                if self._queues.waiting.num_waiting == known and not self._supervisor.is_closed:
                    self._changed.wait(_GATHER_S if is_cpu or known > 1 else _SECOND_S)

    def _fills_pass(self) -> bool:
        """Whether prompts that wait have the tokens of a pass."""
        with self._changed:
            return sum(len(job.tokens) for job in self._queues.waiting.entries()) >= self.runner.pass_len

    def _end_overdue(self) -> None:
        """End jobs, waiting or running, that were cancelled or are past their deadline."""
        now, queues = self._clock(), self._queues
        with self._changed:
            if now < self._first_due:  # as a rule; told without looking at each
                return
            jobs = queues.waiting.remove_if(lambda job: is_over(job, now))
            tasks = [task for task in queues.tasks if is_over(task.job, now)]
            running = [task.job for task in queues.tasks if not is_over(task.job, now)]
            self._first_due = min(map(_due_at, (*queues.waiting.entries(), *running)), default=math.inf)
        for job in jobs:
            job.end(Ended("cancelled" if job.is_cancelled else "late"))
        self.num_cancelled += sum(job.is_cancelled for job in (*jobs, *(task.job for task in tasks)))
        for task in tasks:
            queues.end(task, "cancelled" if task.job.is_cancelled else "late")

    def _fail_all(self, error: Exception) -> None:
        self._queues.end_all("failed", error)
        self._decodes.reset()
        self._flush()


def _due_at(job: Job) -> float:
    return math.inf if job.deadline is None else job.deadline
