"""The scheduler's queues: waiting jobs, and admitted tasks that prefill, decode or are preempted.

Every job is in exactly one of them at any time. `changed` guards `waiting`; the scheduler's thread alone touches the
others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Condition

from kvfold.engine.scheduling.fair_queue import FairQueue
from kvfold.engine.scheduling.jobs import Ended, EndReason, Job
from kvfold.engine.scheduling.task import Task

_log = logging.getLogger("kvfold.engine")


def is_over(job: Job, now: float) -> bool:
    """Whether it was cancelled or is past its deadline."""
    return job.is_cancelled or (job.deadline is not None and now >= job.deadline)


class Queues:
    """`evict_idle` frees pages of an idle prefix and returns whether there was one."""

    def __init__(self, evict_idle: Callable[[], bool]) -> None:
        self.changed = Condition()
        self.waiting: FairQueue[Job] = FairQueue()
        self.prefilling: deque[Task] = deque()
        self.decoding: list[Task] = []  # the oldest first
        self.preempted: deque[Task] = deque()  # KV cache on the host, the oldest first
        self._evict_idle = evict_idle

    @property
    def tasks(self) -> list[Task]:
        return [*self.preempted, *self.prefilling, *self.decoding]

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.preempted)

    def num_of(self, tenant: str) -> int:
        """Running tasks of a tenant."""
        return sum(task.tenant == tenant for task in self.tasks)

    def remove(self, task: Task) -> None:
        self.preempted = deque(other for other in self.preempted if other is not task)
        self.prefilling = deque(other for other in self.prefilling if other is not task)
        self.decoding = [other for other in self.decoding if other is not task]

    def requeue(self, task: Task) -> None:
        """Back to the head of the waiting queue; its prefill starts from the beginning."""
        self.remove(task)
        task.release()
        with self.changed:
            self.waiting.push_front(task.job)

    def end(self, task: Task, reason: EndReason, error: Exception | None = None) -> None:
        self.remove(task)
        task.end(reason, error)

    def fail(self, task: Task, error: Exception) -> None:
        """End one task with an error; the others continue."""
        self.end(task, "failed", error)

    def end_all(self, reason: EndReason, error: Exception | None = None) -> None:
        tasks = self.tasks
        with self.changed:
            jobs = list(self.waiting.entries())
            self.waiting.clear()
            self.preempted, self.prefilling, self.decoding = deque(), deque(), []
        for task in tasks:
            task.end(reason, error)
        for job in jobs:
            job.end(Ended(reason, error=error))

    def evict_idle(self) -> bool:
        """Whether pages of an idle prefix were freed; an error in that fails no request."""
        try:
            return self._evict_idle()
        except Exception:
            _log.exception("an idle prefix could not be evicted")
            return False
