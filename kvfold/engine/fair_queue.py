"""Who is next: one queue for each tenant, served in turn, so that nobody's burst makes another wait for all of it; and
of those that run, whose tenant has had the least time."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar


class Tenanted(Protocol):
    """Anything that belongs to a tenant."""

    @property
    def tenant(self) -> str: ...


T = TypeVar("T", bound=Tenanted)


class Lines(OrderedDict[str, "deque[T]"]):
    """Queues by tenant; the first one is next."""

    def join(self, item: T) -> None:
        self.setdefault(item.tenant, deque()).append(item)

    def rejoin(self, item: T) -> None:
        """Before everybody else: it has had its turn and lost its place."""
        self.setdefault(item.tenant, deque()).appendleft(item)
        self.move_to_end(item.tenant, last=False)

    def firsts(self, can_go: Callable[[T], bool]) -> list[T]:
        """Of each tenant in turn, the first that can go, if any can."""
        found = (next(filter(can_go, line), None) for line in self.values())
        return [item for item in found if item is not None]

    def pop_first(self) -> T:
        """The first of all; its tenant goes to the end."""
        item = next(iter(self.values()))[0]
        self.take(item)
        return item

    def take(self, item: T) -> None:
        """Out of its line; its tenant goes to the end."""
        self[item.tenant].remove(item)
        self.move_to_end(item.tenant)
        self._forget_empty()

    def drop(self, is_over: Callable[[T], bool]) -> list[T]:
        """Take out those for which this holds."""
        gone = [item for item in self.everyone() if is_over(item)]
        for item in gone:
            self[item.tenant].remove(item)
        self._forget_empty()
        return gone

    def everyone(self) -> Iterator[T]:
        return (item for line in self.values() for item in line)

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.values()))

    def _forget_empty(self) -> None:
        for tenant in [tenant for tenant, line in self.items() if not line]:
            del self[tenant]


class Turns:
    """Time that tenants have had, of those that have something to run: the one that has had the least is next."""

    def __init__(self) -> None:
        self._spent_s: dict[str, float] = {}

    def next(self, items: Sequence[T]) -> T:
        """One of the items, of which there is one; of a tenant's own, the first. Who comes new is next, and counts as
        having had as much as the others: nobody saves time up, nor is late for ever."""
        tenants = dict.fromkeys(item.tenant for item in items)
        known = {tenant: self._spent_s[tenant] for tenant in tenants if tenant in self._spent_s}
        least_s = min(known.values(), default=0.0)
        self._spent_s = {tenant: known.get(tenant, least_s) for tenant in tenants}
        return min(items, key=lambda item: (item.tenant in known, self._spent_s[item.tenant]))

    def charge(self, tenant: str, seconds: float) -> None:
        self._spent_s[tenant] += seconds
