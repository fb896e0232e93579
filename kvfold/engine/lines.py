"""Who is next: one queue for each tenant, served in turn, so that nobody's burst makes another wait for all of it."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
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

    def first(self) -> T | None:
        return next((line[0] for line in self.values()), None)

    def pop_first(self) -> T:
        """The next one; its tenant goes to the end."""
        tenant, line = next(iter(self.items()))
        item = line.popleft()
        self.move_to_end(tenant)
        self._forget_empty()
        return item

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
