"""Shards share items out: every item to exactly one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.bench.plan import Shard
from kvfold.errors import InputError


@given(num_shards=st.integers(1, 20), item=st.integers(0, 10_000))
def test_every_item_has_exactly_one_shard(num_shards: int, item: int) -> None:
    assert sum(Shard(index, num_shards).takes(item) for index in range(num_shards)) == 1


def test_a_shard_is_written_as_it_is_read() -> None:
    shard = Shard.parse("3/12")
    assert shard == Shard(3, 12) and str(shard) == "3/12"
    assert [item for item in range(30) if shard.takes(item)] == [3, 15, 27]


def test_everything_is_the_default() -> None:
    assert all(map(Shard().takes, range(5)))


@pytest.mark.parametrize("text", ("3", "a/b", "-1/4", "1/4/2", ""))
def test_what_is_no_shard_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no shard; write I/N"):
        Shard.parse(text)


@pytest.mark.parametrize("text", ("4/4", "0/0"))
def test_a_shard_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"shard {text} does not exist"):
        Shard.parse(text)
