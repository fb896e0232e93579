"""Many requests on one runner: continuous batching in one thread, which alone touches the model and its arena.

In each turn the thread lets jobs in, reads prompts for a slice of time (engine/time_slice.py), a chunk of tokens at
most, and runs one step of all replies. A prompt that is not through pauses between two layers until its next turn. Few
prompts are read at a time: what waits holds no memory yet, and finds prefixes that those before it have stored. A job
is let in when the arena has room for its whole prompt beside what the others may need next. When a step finds no page,
the newest reply moves to the host and comes back, bit for bit, when there is room.

What one tenant cannot do to another:

- Its prompts take no more than their share of the time in which prompts are read.
- Whoever reads nothing may begin to read. Of the few places to read, a tenant's long prompts take all but one: the last
  one is for a prompt of a chunk or less.
- With `num_kept` places to run, so many stay free for whoever runs nothing.
- A job that finds no room for what its own tenant holds lets those of others pass.

What is guaranteed when something raises:

- An exception in anything done for one task (its source, its listener, reading, sampling, moving to the host and back)
  fails that task alone. Its pages go back, and its listener is told `Ended("failed")` once.
- A decode step runs many tasks in one pass, which does not say whose fault an exception is. The batch is halved until
  those that fail alone are found; all others have their step. A task whose cache the failed pass has changed already
  cannot repeat the step and fails as well; a pass changes caches last, so that is a matter of a few lines.
- If the loop raises in spite of that, every job fails, and the loop starts anew: at most `MOST_RESTARTS` times a
  minute. Then the scheduler is over, takes no more jobs, and says so (`state`, `on_failure`).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from threading import Condition, Thread
from typing import Any, Literal

from kvfold.engine.admission import Room
from kvfold.engine.async_decode import Ahead, can_run_ahead
from kvfold.engine.fair_queue import Lines, Turns
from kvfold.engine.generate import step, step_greedily
from kvfold.engine.jobs import Ended, EndReason, Job
from kvfold.engine.runner import Runner
from kvfold.engine.task import Task
from kvfold.engine.time_slice import TimeSlice
from kvfold.errors import InputError, OutOfPages, Overloaded, PrefixLost
from kvfold.policy.policy import Policy
from kvfold.store.binding import kind_of

MOST_RESTARTS = 5  # in a minute: what fails more often is not going to stop
RESTART_S = 0.2  # before the loop starts anew
_MOST_READING = 4  # prompts: few, but no long one holds up all short ones
_SHORTEST = 8  # pieces in a chunk: few tokens take as long as the weights take to pass by
_log = logging.getLogger("kvfold.engine")

State = Literal["running", "restarting", "failed", "closed"]


class Scheduler:
    """`num_kept`: places to run that are kept for tenants that run nothing. `slice_s`: how long prompts are read
    between two steps; None adapts to how long steps take. `make_room` gives up something held in the arena for later
    and returns whether there was anything. `on_failure` is called in the thread when the loop has failed for good."""

    def __init__(
        self,
        runner: Runner,
        policy: Policy,
        tokenizer: Any,
        *,
        max_running: int = 64,
        max_waiting: int = 256,
        num_kept: int = 0,
        slice_s: float | None = None,
        make_room: Callable[[], bool] = lambda: False,
        on_failure: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_running < 1 or max_waiting < 1:
            raise InputError(f"max_running is {max_running}, max_waiting {max_waiting}; both must be at least 1")
        if not 0 <= num_kept < max_running:
            raise InputError(f"num_kept is {num_kept}; it must be at least 0 and below max_running, {max_running}")
        self.runner = runner
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.num_demoted = 0
        self.num_cancelled = 0  # before their end
        self._num_kept = num_kept
        self._tokenizer = tokenizer
        self._give_way = make_room
        self._on_failure = on_failure
        self._clock = clock
        self._slice = TimeSlice(clock, runner.arena.device, slice_s)
        self._turns = Turns()
        self._room = Room(runner, policy)
        self._in_pieces = kind_of(policy, runner.spec) == "chunks"
        self._changed = Condition()
        self._lines: Lines[Job] = Lines()
        self._aside: deque[Task] = deque()  # replies on the host, the oldest first
        self._reading: deque[Task] = deque()
        self._writing: list[Task] = []  # the oldest first
        self._ahead: Ahead | None = None
        self._stepped: list[Task] = []
        self._is_closed = False
        self._state: State = "running"
        self._restarts: deque[float] = deque(maxlen=MOST_RESTARTS)  # when
        self._thread = Thread(target=self._supervise, name="kvfold-scheduler", daemon=True)
        self._thread.start()

    # From any thread

    def submit(self, job: Job) -> None:
        """Queue a job. Overloaded if too many wait."""
        with self._changed:
            if self._is_closed:
                raise Overloaded("the server is shutting down; send the request to another one")
            if self._state == "failed":
                raise Overloaded("the server has failed and is about to end; send the request to another one")
            if self._lines.num_waiting >= self.max_waiting:
                raise Overloaded(f"{self.max_waiting} requests wait already; try again later")
            self._lines.join(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """The job ends before its next step; nothing happens if it has ended."""
        with self._changed:
            job.is_cancelled = True
            self._changed.notify()

    def close(self, timeout_s: float | None = None) -> bool:
        """End everything as cancelled and wait for the thread, at most so long; returns whether it has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def state(self) -> State:
        """Whether jobs are being worked on, or would be: "running"."""
        if self._is_closed:
            return "closed"
        return self._state if self._thread.is_alive() else "failed"

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return self._lines.num_waiting

    @property
    def num_running(self) -> int:
        """Jobs that have been let in, on the host or not."""
        return len(self._reading) + len(self._writing) + len(self._aside)

    # In the thread

    def _supervise(self) -> None:
        """The loop until it is closed, started anew where it raises."""
        while self._state != "failed":
            try:
                self._work()
                return
            except BaseException as error:
                _log.critical("the scheduler's loop raised; every request fails", exc_info=True)
                self._recover(error)

    def _recover(self, error: BaseException) -> None:
        """Fail every job, since whoever broke the loop may be among them, and wait a moment before the next attempt."""
        now = time.monotonic()
        is_hopeless = len(self._restarts) == MOST_RESTARTS and now - self._restarts[0] < 60
        self._restarts.append(now)
        with self._changed:
            self._state = "failed" if is_hopeless else "restarting"
        self._end_all("failed", error if isinstance(error, Exception) else RuntimeError(repr(error)))
        self._ahead, self._stepped = None, []
        if is_hopeless:
            _log.critical("the scheduler's loop raised more than %d times in a minute; it is over", MOST_RESTARTS)
            self._on_failure()
            return
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, RESTART_S)
            self._state = "running"

    def _end_all(self, reason: EndReason, error: Exception | None = None) -> None:
        tasks = self._tasks()
        with self._changed:
            waiting, self._lines = list(self._lines.everyone()), Lines()
            self._aside, self._reading, self._writing = deque(), deque(), []
        for task in tasks:
            task.end(reason, error)
        for job in waiting:
            job.end(Ended(reason, error=error))

    def _work(self) -> None:
        while self._wait():
            self._sweep()
            self._come_back()
            self._let_in()
            self._read()
            self._write()
        self._end_all("cancelled")

    def _wait(self) -> bool:
        """Until there is something to do; False when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._lines or self.num_running)
            return not self._is_closed

    def _tasks(self) -> list[Task]:
        """Every task is in one of these, at any time."""
        return [*self._aside, *self._reading, *self._writing]

    def _sweep(self) -> None:
        """End what was cancelled or is late, waiting or not."""
        now = self._clock()
        with self._changed:
            gone = self._lines.drop(lambda job: _is_over(job, now))
        for job in gone:
            job.end(Ended("cancelled" if job.is_cancelled else "late"))
        over = [task for task in self._tasks() if _is_over(task.job, now)]
        self.num_cancelled += sum(job.is_cancelled for job in (*gone, *(task.job for task in over)))
        for task in over:
            self._end(task, "cancelled" if task.job.is_cancelled else "late")

    def _end(self, task: Task, reason: EndReason, error: Exception | None = None) -> None:
        self._forget(task)
        task.end(reason, error)

    def _fail(self, task: Task, error: Exception) -> None:
        """Alone; the others go on."""
        self._end(task, "failed", error)

    def _forget(self, task: Task) -> None:
        self._aside = deque(other for other in self._aside if other is not task)
        self._reading = deque(other for other in self._reading if other is not task)
        self._writing = [other for other in self._writing if other is not task]

    def _make_room(self) -> bool:
        """Whether something gave way; whoever holds it for later is not to fail a request."""
        try:
            return self._give_way()
        except Exception:
            _log.exception("what is held for later could not give way")
            return False

    # Letting in

    def _let_in(self) -> None:
        """Jobs in turn while there is room. One that is alone is tried in any case: a bound is not a need."""
        while not self._aside and self._let_one_in():
            pass

    def _let_one_in(self) -> bool:
        """Whether a job has left the line."""
        with self._changed:
            firsts = self._lines.firsts(self._has_place)
        for job in firsts:
            try:
                if not self._has_room(self._room.reading_bound(len(job.tokens))):
                    if self._num_of(job.tenant):
                        continue  # others need not wait for what its own tenant holds
                    return False  # or small ones would pass it for ever
                task = Task(job, self.runner, self._tokenizer, in_pieces=self._in_pieces)
            except OutOfPages as error:
                if self._tasks() or self._make_room():
                    return False  # it waits on, for what others hold
                self._refuse(job, error)
            except Exception as error:  # of whoever stored the prefix
                self._refuse(job, error)
            else:
                self._take(job)
                self._reading.append(task)
            return True
        return False

    def _has_place(self, job: Job) -> bool:
        num_free = self.max_running - self.num_running
        if num_free <= (self._num_kept if self._num_of(job.tenant) else 0):
            return False
        if all(task.tenant != job.tenant for task in self._reading):
            return True
        is_long = len(job.tokens) > self.runner.chunk_len
        return len(self._reading) < _MOST_READING - is_long

    def _num_of(self, tenant: str) -> int:
        """Tasks of a tenant."""
        return sum(task.tenant == tenant for task in self._tasks())

    def _refuse(self, job: Job, error: Exception) -> None:
        self._take(job)
        job.end(Ended("failed", error=error))

    def _take(self, job: Job) -> None:
        with self._changed:
            self._lines.take(job)

    def _has_room(self, num_bytes: int) -> bool:
        tasks = [task.sequence for task in self._reading], [len(task.job.tokens) for task in self._reading]
        writing = [task.sequence for task in self._writing]
        while not self._room.fits(num_bytes, *tasks, writing):
            if not self._make_room():
                return not self._tasks()
        return True

    def _come_back(self) -> None:
        """Replies from the host, before anybody new."""
        while self._aside:
            task = self._aside[0]
            try:
                if not self._has_room(self._room.bound(task.len_aside)) and (self._reading or self._writing):
                    return
                task.come_back()
            except OutOfPages as error:
                if not self._make_room():
                    if not self._reading and not self._writing:
                        self._fail(task, error)
                    return
            except Exception as error:  # the copy is of no use
                self._fail(task, error)
            else:
                self._writing.append(self._aside.popleft())

    # Reading

    def _read(self) -> None:
        """Pieces of prompts in turn, for a slice of time and a chunk of tokens in all, but for a first piece that is
        longer."""
        chunk, num_read = self.runner.chunk_len, 0
        self._slice.begin()
        while ready := self._can_read():
            task, began = self._turns.next(ready), self._clock()
            try:
                length = task.piece_len
                if num_read and num_read + length > chunk:
                    return
                num_read += max(length, chunk // _SHORTEST)
                task.stuck_at = None
                task.read(partial(self._is_due, task.job))
                is_reading = task.is_reading
            except OutOfPages as error:
                self._wait_or_fail(task, error)
                return
            except PrefixLost:
                self._lost(task)
            except Exception as error:
                self._fail(task, error)
            else:
                self._reading.remove(task)
                (self._reading if is_reading else self._writing).append(task)
            finally:
                self._turns.charge(task.tenant, self._clock() - began)
            self._let_in()
            if self._has_others() and self._slice.is_over():
                return

    def _can_read(self) -> list[Task]:
        """Tasks that read, but for those for which nothing has become free since they found too little; while nobody
        writes, these as well."""
        free = self.runner.arena.free_bytes
        found = [task for task in self._reading if task.stuck_at is None or free > task.stuck_at]
        return found if found or self._writing else list(self._reading)

    def _is_due(self, job: Job) -> bool:
        """Whether a pass is to pause: it is over, or others have waited long enough."""
        if self._is_closed or _is_over(job, self._clock()):
            return True
        return self._has_others() and self._slice.is_over()

    def _has_others(self) -> bool:
        """Whether there is anything beside one prompt that is being read."""
        return bool(self._writing or self._aside or self._lines) or len(self._reading) > 1

    def _wait_or_fail(self, task: Task, error: OutOfPages) -> None:
        """Room was found, or will be when others end; a task that is alone has failed."""
        if self._make_room():
            return
        if self._writing:
            task.stuck_at = self.runner.arena.free_bytes
        elif len(self._reading) > 1:
            self._start_anew(task)  # nobody writes, and prompts block each other
        else:
            self._fail(task, error)

    def _lost(self, task: Task) -> None:
        """Its stored prefix turned out bad; it begins again without it."""
        try:
            task.job.source.lost()
        except Exception as error:
            self._fail(task, error)
        else:
            self._start_anew(task)

    def _start_anew(self, task: Task) -> None:
        """From the beginning, when there is room."""
        self._forget(task)
        task.release()
        with self._changed:
            self._lines.rejoin(task.job)

    # Writing

    def _write(self) -> None:
        """One step of all replies."""
        for task in list(self._writing):
            self._sample(task)
        began = self._clock()
        batches: list[Sequence[Task]] = [self._writing]
        while batches:
            batch = [task for task in batches.pop() if task in self._writing]  # others have left or failed since
            if batch:
                batches += self._try_step(batch)
        if self._writing:
            self._slice.stepped(self._clock() - began)

    def _sample(self, task: Task) -> None:
        try:
            if task.is_sampled or task.write():  # what was sampled already waits for its step
                return
        except Exception as error:
            self._fail(task, error)
        else:
            self._forget(task)

    def _try_step(self, batch: Sequence[Task]) -> list[Sequence[Task]]:
        """Run one step of a batch; returns batches that are to be tried next, the last one first."""
        lens = [task.sequence.logical_len for task in batch]
        try:
            told = self._step(batch)
        except OutOfPages as error:
            self._ahead = None
            if not self._make_room() and not self._demote():
                self._fail(self._writing[-1], error)
            return [batch]
        except Exception as error:
            self._ahead = None
            return self._halves(batch, lens, error)
        for task, tell in zip(batch, told, strict=True):
            try:
                tell()
            except Exception as error:
                self._fail(task, error)
        return []

    def _halves(self, batch: Sequence[Task], lens: Sequence[int], error: Exception) -> list[Sequence[Task]]:
        """Of a batch whose step raised: who may be at fault is tried with fewer others, until alone."""
        rest = [task for task, length in zip(batch, lens, strict=True) if task.can_step_again(length)]
        for task in batch if len(batch) == 1 else set(batch).difference(rest):
            self._fail(task, error)
        half = len(rest) // 2
        return [rest[half:], rest[:half]]

    def _step(self, tasks: Sequence[Task]) -> Iterable[Callable[[], None]]:
        writers = [task.running for task in tasks]
        if all(writer.is_greedy and can_run_ahead(self.runner, writer.request.sequence) for writer in writers):
            if not set(tasks) <= set(self._stepped):
                self._ahead = None  # somebody new was not in the step that is queued
            told, self._ahead = step_greedily(self.runner, writers, self._ahead)
            self._stepped = list(tasks)
            return told
        self._ahead = None
        return step(self.runner, writers)

    def _demote(self) -> bool:
        """Move the newest reply that can leave to the host, if another one stays."""
        if len(self._writing) + len(self._reading) < 2:
            return False
        for task in reversed(self._writing):
            try:
                if not task.can_leave:
                    continue
                task.leave()
            except Exception as error:
                self._fail(task, error)  # which makes room as well
            else:
                self._forget(task)
                self._aside.append(task)
                self.num_demoted += 1
            return True
        return False


def _is_over(job: Job, now: float) -> bool:
    return job.is_cancelled or (job.deadline is not None and now >= job.deadline)
