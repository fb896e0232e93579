"""Many requests on one runner: continuous batching in one thread, which alone touches the model and its arena.

In each turn the thread lets jobs in, reads pieces of prompts, a chunk of tokens in all, and runs one step of all
replies. So a step waits for no more than a chunk, and short prompts do not wait for each other's steps. Few prompts are
read at a time, in turns: what waits holds no memory yet, and finds prefixes that those before it have stored. Tenants
take turns. A job is let in when the arena has room for its whole prompt beside what the others may need next. When a
step finds no page, the newest reply moves to the host and comes back, bit for bit, when there is room.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import Any

from kvfold.engine.ahead import Ahead, can_run_ahead
from kvfold.engine.generate import step, step_greedily
from kvfold.engine.jobs import Ended, EndReason, Job
from kvfold.engine.lines import Lines
from kvfold.engine.room import Room
from kvfold.engine.runner import Runner
from kvfold.engine.task import Task
from kvfold.errors import InputError, OutOfPages, Overloaded, PrefixLost
from kvfold.policy.policy import Policy
from kvfold.store.binding import kind_of

_MOST_READING = 4  # prompts: few, but no long one holds up all short ones
_SHORTEST = 8  # pieces in a chunk: few tokens take as long as the weights take to pass by


class Scheduler:
    """`make_room` gives up something held in the arena for later and returns whether there was anything."""

    def __init__(
        self,
        runner: Runner,
        policy: Policy,
        tokenizer: Any,
        *,
        max_running: int = 64,
        max_waiting: int = 256,
        make_room: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_running < 1 or max_waiting < 1:
            raise InputError(f"max_running is {max_running}, max_waiting {max_waiting}; both must be at least 1")
        self.runner = runner
        self.max_running = max_running
        self.max_waiting = max_waiting
        self.num_demoted = 0
        self.num_cancelled = 0  # before their end
        self._tokenizer = tokenizer
        self._make_room = make_room
        self._clock = clock
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
        self._thread = Thread(target=self._work, name="kvfold-scheduler", daemon=True)
        self._thread.start()

    # From any thread

    def submit(self, job: Job) -> None:
        """Queue a job. Overloaded if too many wait."""
        with self._changed:
            if self._is_closed:
                raise Overloaded("the server is shutting down; send the request to another one")
            if self._lines.num_waiting >= self.max_waiting:
                raise Overloaded(f"{self.max_waiting} requests wait already; try again later")
            self._lines.join(job)
            self._changed.notify()

    def cancel(self, job: Job) -> None:
        """The job ends before its next step; nothing happens if it has ended."""
        with self._changed:
            job.is_cancelled = True
            self._changed.notify()

    def close(self) -> None:
        """End everything as cancelled and wait for the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    @property
    def num_waiting(self) -> int:
        with self._changed:
            return self._lines.num_waiting

    @property
    def num_running(self) -> int:
        """Jobs that have been let in, on the host or not."""
        return len(self._reading) + len(self._writing) + len(self._aside)

    # In the thread

    def _work(self) -> None:
        while self._wait():
            self._sweep()
            self._come_back()
            self._let_in()
            self._read()
            self._write()
        for task in self._tasks():
            task.end("cancelled")
        for job in self._lines.drop(lambda job: True):
            job.listener(Ended("cancelled"))
        self._reading.clear()
        self._writing.clear()
        self._aside.clear()

    def _wait(self) -> bool:
        """Until there is something to do; False when it is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._lines or self.num_running)
            return not self._is_closed

    def _tasks(self) -> list[Task]:
        return [*self._aside, *self._reading, *self._writing]

    def _sweep(self) -> None:
        """End what was cancelled or is late, waiting or not."""
        now = self._clock()
        with self._changed:
            gone = self._lines.drop(lambda job: _is_over(job, now))
        for job in gone:
            job.listener(Ended("cancelled" if job.is_cancelled else "late"))
        over = [task for task in self._tasks() if _is_over(task.job, now)]
        self.num_cancelled += sum(job.is_cancelled for job in (*gone, *(task.job for task in over)))
        for task in over:
            self._end(task, "cancelled" if task.job.is_cancelled else "late")

    def _end(self, task: Task, reason: EndReason, error: Exception | None = None) -> None:
        self._forget(task)
        task.end(reason, error)

    def _forget(self, task: Task) -> None:
        self._aside = deque(other for other in self._aside if other is not task)
        self._reading = deque(other for other in self._reading if other is not task)
        self._writing = [other for other in self._writing if other is not task]

    # Letting in

    def _let_in(self) -> None:
        """Jobs in turn while there is room. One that is alone is tried in any case: a bound is not a need."""
        while not self._aside and self.num_running < self.max_running and len(self._reading) < _MOST_READING:
            with self._changed:
                job = self._lines.first()
                if job is None or not self._has_room(len(job.tokens)):
                    return
                self._lines.pop_first()
            try:
                self._reading.append(Task(job, self.runner, self._tokenizer, in_pieces=self._in_pieces))
            except OutOfPages as error:
                if self._retreat(job, error):
                    return
            except Exception as error:  # of whoever stored the prefix; the job fails, the thread goes on
                job.listener(Ended("failed", error=error))

    def _retreat(self, job: Job, error: OutOfPages) -> bool:
        """Whether the job waits again, for what others hold; else it has failed."""
        if self._tasks() or self._make_room():
            with self._changed:
                self._lines.rejoin(job)
            return True
        job.listener(Ended("failed", error=error))
        return False

    def _has_room(self, num_tokens: int) -> bool:
        tasks = [task.sequence for task in self._reading], [len(task.job.tokens) for task in self._reading]
        writing = [task.sequence for task in self._writing]
        while not self._room.fits(num_tokens, *tasks, writing):
            if not self._make_room():
                return not self._tasks()
        return True

    def _come_back(self) -> None:
        """Replies from the host, before anybody new."""
        while self._aside:
            task = self._aside[0]
            if not self._has_room(task.len_aside) and (self._reading or self._writing):
                return
            try:
                task.come_back()
            except OutOfPages as error:
                if not self._make_room():
                    if not self._reading and not self._writing:
                        self._end(task, "failed", error)
                    return
            else:
                self._writing.append(self._aside.popleft())

    # Running

    def _read(self) -> None:
        """Pieces of prompts in turn, a chunk of tokens in all, but for a first piece that is longer."""
        chunk, num_read = self.runner.chunk_len, 0
        while self._reading and (num_read == 0 or num_read + self._reading[0].piece_len <= chunk):
            task = self._reading.popleft()
            num_read += max(task.piece_len, chunk // _SHORTEST)
            try:
                task.read()
            except OutOfPages as error:
                self._wait_or_fail(task, error)
                return
            except PrefixLost:
                task.job.source.lost()
                self._start_anew(task)
            except Exception as error:
                self._end(task, "failed", error)
            else:
                (self._reading if task.is_reading else self._writing).append(task)
            self._let_in()

    def _wait_or_fail(self, task: Task, error: OutOfPages) -> None:
        """Room was found, or will be when others end; a task that is alone has failed."""
        if self._make_room() or self._writing:
            self._reading.appendleft(task)
        elif self._reading:
            self._start_anew(task)  # nobody writes, and prompts block each other
        else:
            task.end("failed", error)

    def _start_anew(self, task: Task) -> None:
        """From the beginning, when there is room."""
        task.sequence.release()
        with self._changed:
            self._lines.rejoin(task.job)

    def _write(self) -> None:
        """One step of all replies."""
        self._writing = [task for task in self._writing if self._sampled(task)]
        while self._writing:
            try:
                self._step(self._writing)
                return
            except OutOfPages as error:
                self._ahead = None
                if not self._make_room() and not self._demote():
                    self._end(self._writing[-1], "failed", error)
            except Exception as error:
                for task in list(self._writing):
                    self._end(task, "failed", error)

    def _sampled(self, task: Task) -> bool:
        """A token that was sampled already waits for its step."""
        return task.is_sampled or task.write()

    def _step(self, tasks: Sequence[Task]) -> None:
        writers = [task.running for task in tasks]
        if all(writer.is_greedy and can_run_ahead(self.runner, writer.request.sequence) for writer in writers):
            if not set(tasks) <= set(self._stepped):
                self._ahead = None  # somebody new was not in the step that is queued
            self._ahead = step_greedily(self.runner, writers, self._ahead)
            self._stepped = list(tasks)
        else:
            self._ahead = None
            step(self.runner, writers)

    def _demote(self) -> bool:
        """Move the newest reply that can leave to the host, if another one stays."""
        if len(self._writing) + len(self._reading) < 2:
            return False
        for task in reversed(self._writing):
            if task.can_leave:
                self._forget(task)
                task.leave()
                self._aside.append(task)
                self.num_demoted += 1
                return True
        return False


def _is_over(job: Job, now: float) -> bool:
    return job.is_cancelled or (job.deadline is not None and now >= job.deadline)
