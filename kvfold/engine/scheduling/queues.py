"""The scheduler's queues: waiting jobs, and admitted tasks that prefill, decode or are preempted.

Every job is in exactly one of them at any time. `changed` guards `waiting`; the scheduler's thread alone touches the
others. Between tenants queuing is fair: a waiting queue per tenant, served round-robin, and the prefill time each used.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from threading import Condition
from typing import Protocol, TypeVar

from kvfold.engine.scheduling.jobs import Ended, EndReason, Job
from kvfold.engine.scheduling.task import Task


class Tenanted(Protocol):
    """Anything that belongs to a tenant."""

    @property
    def tenant(self) -> str: ...


T = TypeVar("T", bound=Tenanted)


class FairQueue(OrderedDict[str, "deque[T]"]):
    """FIFO queues by tenant, served round-robin; the first tenant is next."""

    def push(self, item: T) -> None:
        self.setdefault(item.tenant, deque()).append(item)

    def push_front(self, item: T) -> None:
        """Requeue before all others, for an item that was admitted and lost its pages."""
        self.setdefault(item.tenant, deque()).appendleft(item)
        self.move_to_end(item.tenant, last=False)

    def candidates(self, can_run: Callable[[T], bool]) -> list[T]:
        """The first item of each tenant that can run, in round-robin order."""
        found = (next(filter(can_run, queue), None) for queue in self.values())
        return [item for item in found if item is not None]

    def pop_first(self) -> T:
        """Remove and return the first item of the first tenant; that tenant moves to the end."""
        item = next(iter(self.values()))[0]
        self.remove(item)
        return item

    def remove(self, item: T) -> None:
        """Remove an item; its tenant moves to the end."""
        self[item.tenant].remove(item)
        self.move_to_end(item.tenant)
        self._drop_empty()

    def remove_if(self, condition: Callable[[T], bool]) -> list[T]:
        """Remove and return the items for which the condition holds; the order of tenants stays."""
        removed = [item for item in self.entries() if condition(item)]
        for item in removed:
            self[item.tenant].remove(item)
        self._drop_empty()
        return removed

    def entries(self) -> Iterator[T]:
        return (item for queue in self.values() for item in queue)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.values()))

    def _drop_empty(self) -> None:
        for tenant in [tenant for tenant, queue in self.items() if not queue]:
            del self[tenant]


class FairShare:
    """Seconds used by each active tenant; the least served one is next (start-time fair queuing)."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}

    def next(self, items: Sequence[T]) -> T:
        """One of at least one item; of a tenant's own, the first. A newly active tenant is next and starts at the
        least used time of the others: idle time is not credited."""
        tenants = dict.fromkeys(item.tenant for item in items)
        known = {tenant: self._used_s[tenant] for tenant in tenants if tenant in self._used_s}
        least_s = min(known.values(), default=0.0)
        self._used_s = {tenant: known.get(tenant, least_s) for tenant in tenants}
        return min(items, key=lambda item: (item.tenant in known, self._used_s[item.tenant]))

    def charge(self, tenant: str, seconds: float) -> None:
        self._used_s[tenant] += seconds


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

    def remove(self, task: Task) -> None:
        queues: tuple[deque[Task] | list[Task], ...] = self.decoding, self.prefilling, self.preempted
        for queue in queues:
            with suppress(ValueError):
                queue.remove(task)
                return

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
