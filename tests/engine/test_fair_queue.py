"""Lines of tenants against a plain model: nobody is served twice while another waits, and order within a line holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvfold.engine.fair_queue import Lines, Turns


@dataclass(eq=False)
class Item:
    tenant: str
    number: int


def anybody(_: Item) -> bool:
    return True


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_tenants_take_turns(tenants: list[str]) -> None:
    lines: Lines[Item] = Lines()
    for number, tenant in enumerate(tenants):
        lines.join(Item(tenant, number))
    assert lines.num_waiting == len(tenants)
    served = [lines.pop_first() for _ in tenants]
    assert not lines.firsts(anybody)
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
    lines: Lines[Item] = Lines()
    items = [Item("a", 0), Item("b", 1), Item("b", 2)]
    for item in items:
        lines.join(item)
    first = lines.pop_first()
    lines.rejoin(first)
    assert lines.firsts(anybody)[0] is items[0]
    assert lines.drop(lambda item: item.tenant == "a") == [items[0]]
    assert list(lines) == ["b"]
    assert [lines.pop_first(), lines.pop_first()] == items[1:]


def test_one_that_cannot_go_lets_those_behind_it_pass() -> None:
    lines: Lines[Item] = Lines()
    items = [Item("a", 0), Item("a", 1), Item("b", 2)]
    for item in items:
        lines.join(item)
    assert lines.firsts(lambda item: item.number > 0) == items[1:]
    assert lines.firsts(lambda item: item.tenant == "b") == items[2:]


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.lists(st.integers(1, 9), min_size=1, max_size=60))
def test_time_is_shared_between_tenants_however_many_items_they_have(tenants: list[str], costs: list[int]) -> None:
    items = [Item(tenant, number) for number, tenant in enumerate(tenants)]
    turns, spent = Turns(), dict.fromkeys(tenants, 0.0)
    for cost in costs:
        item = turns.next(items)
        assert spent[item.tenant] == min(spent.values())
        items.remove(item)
        items.append(item)
        turns.charge(item.tenant, cost)
        spent[item.tenant] += cost


def test_who_comes_new_is_next_and_owes_nothing_for_the_time_before() -> None:
    turns, first, second = Turns(), Item("a", 0), Item("b", 1)
    for _ in range(5):
        assert turns.next([first]) is first
        turns.charge("a", 10.0)
    assert turns.next([first, second]) is second
    turns.charge("b", 1.0)
    assert turns.next([first, second]) is first, "it does not wait until the other has had 50"
