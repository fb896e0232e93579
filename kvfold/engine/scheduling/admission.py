"""Admission control: which waiting job starts next, and whether the arena has room for its KV cache.

Few prompts prefill at a time: a waiting job holds no pages, and may hit prefixes that those before it store. One that
shares a long prefix with a prompt in prefill waits for that prefix (shared_prefix.py). A job is admitted when its whole
prompt fits beside what the running tasks may need next. Preempted tasks resume first, but a tenant that runs nothing
starts before those of a tenant whose other tasks run on.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from functools import partial
from typing import Any

from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.jobs import Ended, Job
from kvfold.engine.scheduling.kv_bounds import KVBounds
from kvfold.engine.scheduling.prefill_manager import MOST_JOINED
from kvfold.engine.scheduling.queues import Queues
from kvfold.engine.scheduling.shared_prefix import waits_for
from kvfold.engine.scheduling.task import Task
from kvfold.errors import OutOfPages, TooLarge
from kvfold.policy.policy import Policy
from kvfold.store.store import kind_of

_log = logging.getLogger("kvfold.engine")
_MAX_PREFILLING = 4  # prompts: few, but no long one blocks all short ones


class _Load:
    """What runs while jobs are admitted, counted once and then with each of them: many wait at a time."""

    def __init__(self, queues: Queues) -> None:
        self.is_preempting = bool(queues.preempted)
        self.num_running = len(queues.preempted)
        self.tenants = Counter(task.tenant for task in queues.preempted)
        self.num_decoding = len(queues.decoding)
        self.num_prefilling = self.num_computed = self.prompt_bytes = 0  # of prompts in prefill; tokens to compute
        self.prefilling_tenants: set[str] = set()
        self.prefilling: dict[bytes, list[Task]] = defaultdict(list)  # by the first page
        self.running: dict[bytes, list[Task]] = defaultdict(list)  # with those that decode
        for task in queues.prefilling:
            self.add(task)
        for task in queues.decoding:
            self._count(task)

    def add(self, task: Task) -> None:
        """A job was admitted."""
        self._count(task)
        self.num_prefilling += 1
        self.num_computed += len(task.job.tokens) - task.num_reused
        self.prompt_bytes += task.prompt_bytes
        self.prefilling_tenants.add(task.tenant)
        if task.job.sharing is not None:
            self.prefilling[task.job.first_page].append(task)

    def _count(self, task: Task) -> None:
        self.num_running += 1
        self.tenants[task.tenant] += 1
        if task.job.sharing is not None:
            self.running[task.job.first_page].append(task)


class Admission:
    """At most `max_running` tasks, of which `num_reserved` slots are for tenants that run nothing."""

    def __init__(
        self, runner: Runner, policy: Policy, tokenizer: Any, queues: Queues, max_running: int, num_reserved: int
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._queues = queues
        self._max_running = max_running
        self._num_reserved = num_reserved
        self._bounds = KVBounds(runner, policy)
        self._in_chunks = kind_of(policy, runner.spec) == "chunks"

    def admit(self) -> None:
        """Start waiting jobs, tenants in round-robin order, while there is room."""
        queues = self._queues
        if not queues.waiting or (queues.preempted and not self._newcomers_first()):
            return
        load = _Load(queues)
        while self._admit_one(load):
            pass

    def _admit_one(self, load: _Load) -> bool:
        """Whether a job has left the waiting queue."""
        queues = self._queues
        with queues.changed:
            candidates = queues.waiting.candidates(partial(self._has_slot, load))
        for job in candidates:
            try:
                needed = self._bounds.prefill_bytes(len(job.tokens))
                if not self._has_room(load, needed):
                    if load.tenants[job.tenant]:
                        continue  # its own tenant holds the pages: others need not wait for them
                    return False  # no small job overtakes it, or it would starve
                in_chunks = self._in_chunks if job.in_chunks is None else job.in_chunks
                running = () if job.sharing is None else load.running.get(job.first_page, ())
                task = Task(
                    job, self._runner, self._tokenizer, in_chunks=in_chunks, prompt_bytes=needed, running=running
                )
            except OutOfPages as error:
                if queues.tasks or queues.evict_idle():
                    return False  # it waits for pages of others
                self._refuse(job, TooLarge(str(error)))
            except Exception as error:  # of the source, which loads the stored prefix
                self._refuse(job, error)
            else:
                self._dequeue(job)
                queues.prefilling.append(task)
                load.add(task)
            return True
        return False

    def _has_slot(self, load: _Load, job: Job) -> bool:
        if load.is_preempting and load.tenants[job.tenant]:
            return False
        num_free = self._max_running - load.num_running
        if num_free <= (self._num_reserved if load.tenants[job.tenant] else 0):
            return False
        if job.tenant not in load.prefilling_tenants:
            return True
        if load.num_prefilling >= MOST_JOINED:
            return False
        is_long = len(job.tokens) > self._runner.chunk_len
        most = MOST_JOINED if load.num_computed <= self._runner.pass_len else _MAX_PREFILLING - is_long
        if load.num_prefilling >= most:
            return False
        return not self._waits(load, job)

    def _waits(self, load: _Load, job: Job) -> bool:
        """Whether it is to wait for a prefix that a task computes; an error in telling costs a pass, not the loop."""
        lens = self._runner.chunk_len, self._runner.joined_len
        try:
            return any(waits_for(job, task, *lens) for task in load.prefilling.get(job.first_page, ()))
        except Exception:
            _log.exception("a common prefix could not be told")
            return False

    def _refuse(self, job: Job, error: Exception) -> None:
        self._dequeue(job)
        job.end(Ended("failed", error=error))

    def _dequeue(self, job: Job) -> None:
        with self._queues.changed:
            self._queues.waiting.remove(job)

    def _has_room(self, load: _Load, num_bytes: int) -> bool:
        """Whether so many bytes fit, idle prefixes evicted; True for a job that is alone: a bound is not a need."""
        while not self._bounds.fits(num_bytes, load.prompt_bytes, self._queues.prefilling, load.num_decoding):
            if not self._queues.evict_idle():
                return not load.num_running
        return True

    def _newcomers_first(self) -> bool:
        """Whether a tenant waits that runs nothing, while every tenant with a preempted task has others that run on."""
        queues = self._queues
        active = {task.tenant for task in (*queues.prefilling, *queues.decoding)}
        if queues.num_running >= self._max_running or not active.issuperset(task.tenant for task in queues.preempted):
            return False
        with queues.changed:
            return not active.issuperset(queues.waiting)

    def resume(self) -> None:
        """Swap preempted tasks in, before any job is admitted."""
        queues = self._queues
        while queues.preempted and not self._newcomers_first():
            task = queues.preempted[0]
            try:
                has_room = self._has_room(_Load(queues), self._bounds.kv_bytes(task.preempted_len))
                if not has_room and (queues.prefilling or queues.decoding):
                    return
                task.resume()
            except OutOfPages as error:
                if not queues.evict_idle():
                    if not queues.prefilling and not queues.decoding:
                        queues.fail(task, error)
                    return
            except Exception as error:  # the copy cannot be read
                queues.fail(task, error)
            else:
                queues.decoding.append(queues.preempted.popleft())
