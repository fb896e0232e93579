"""Queues by tenant against a plain model: nobody is served twice while another waits, and order in a queue holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvfold.engine.scheduling.queues import FairQueue, FairShare


@dataclass(eq=False)
class Item:
    tenant: str
    number: int


def anybody(_: Item) -> bool:
    return True


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_tenants_take_turns(tenants: list[str]) -> None:
    queue: FairQueue[Item] = FairQueue()
    for number, tenant in enumerate(tenants):
        queue.push(Item(tenant, number))
    assert queue.num_waiting == len(tenants)
    served = [queue.pop_first() for _ in tenants]
    assert not queue.candidates(anybody)
    for tenant in set(tenants):
        turns = [i for i, item in enumerate(served) if item.tenant == tenant]
        numbers = [served[i].number for i in turns]
        assert numbers == sorted(numbers)
        for start, end in pairwise(turns):
            between = [item.tenant for item in served[start + 1 : end]]
            assert len(between) == len(set(between)), "nobody else has two turns between two of one"
            waiting = {item.tenant for item in served[end:]} - {tenant}
            assert waiting <= set(between), "all who wait have had theirs"


def test_who_comes_back_is_first_and_who_is_over_is_gone() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item("a", 0), Item("b", 1), Item("b", 2)]
    for item in items:
        queue.push(item)
    first = queue.pop_first()
    queue.push_front(first)
    assert queue.candidates(anybody)[0] is items[0]
    assert queue.remove_if(lambda item: item.tenant == "a") == [items[0]]
    assert list(queue) == ["b"]
    assert [queue.pop_first(), queue.pop_first()] == items[1:]


def test_one_that_cannot_go_lets_those_behind_it_pass() -> None:
    queue: FairQueue[Item] = FairQueue()
    items = [Item("a", 0), Item("a", 1), Item("b", 2)]
    for item in items:
        queue.push(item)
    assert queue.candidates(lambda item: item.number > 0) == items[1:]
    assert queue.candidates(lambda item: item.tenant == "b") == items[2:]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_time_is_shared_between_tenants_however_many_items_they_have(tenants: list[str], costs: list[int]) -> None:
    items = [Item(tenant, number) for number, tenant in enumerate(tenants)]
    share, spent = FairShare(), dict.fromkeys(tenants, 0.0)
    for cost in costs:
        item = share.next(items)
        assert spent[item.tenant] == min(spent.values())
        items.remove(item)
        items.append(item)
        share.charge(item.tenant, cost)
        spent[item.tenant] += cost


def test_who_comes_new_is_next_and_owes_nothing_for_the_time_before() -> None:
    share, first, second = FairShare(), Item("a", 0), Item("b", 1)
    for _ in range(5):
        assert share.next([first]) is first
        share.charge("a", 10.0)
    assert share.next([first, second]) is second
    share.charge("b", 1.0)
    assert share.next([first, second]) is first, "it does not wait until the other has had 50"
