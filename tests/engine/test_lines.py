"""Lines of tenants against a plain model: nobody is served twice while another waits, and order within a line holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvfold.engine.lines import Lines


@dataclass(eq=False)
class Item:
    tenant: str
    number: int


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_tenants_take_turns(tenants: list[str]) -> None:
    lines: Lines[Item] = Lines()
    for number, tenant in enumerate(tenants):
        lines.join(Item(tenant, number))
    assert lines.num_waiting == len(tenants)
    served = [lines.pop_first() for _ in tenants]
    assert lines.first() is None
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
    assert lines.first() is items[0]
    assert lines.drop(lambda item: item.tenant == "a") == [items[0]]
    assert list(lines) == ["b"]
    assert [lines.pop_first(), lines.pop_first()] == items[1:]
