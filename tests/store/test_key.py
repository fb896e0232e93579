"""Keys: as long as prompts agree, and no longer; equal in every process; different for everything they are bound to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.store.key import Binding, Key, chunk_keys, snapshot_keys
from tests.store.common import BINDING, CHUNK

SCOPE = BINDING.scope
ids = st.lists(st.integers(0, 3), max_size=24)
big_ids = st.lists(st.integers(0, 2**31 - 1), max_size=24)


@given(ids, ids, st.integers(1, 5))
def test_prompts_share_keys_exactly_as_far_as_they_agree(a: list[int], b: list[int], chunk_len: int) -> None:
    agree = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    left, right = chunk_keys(SCOPE, a, chunk_len), chunk_keys(SCOPE, b, chunk_len)
    same = [x == y for x, y in zip(left, right, strict=False)]
    assert same == [(i + 1) * chunk_len <= agree for i in range(len(same))]
    assert [key.end for key in left] == list(range(chunk_len, len(a) + 1, chunk_len))
    whole = [chunk_keys(SCOPE, tokens, chunk_len, with_rest=True) for tokens in (a, b)]
    assert whole[0][: len(left)] == left and sum(key.num_tokens for key in whole[0]) == len(a)
    assert (whole[0] == whole[1]) == (a == b) and (not a or not b or (whole[0][-1] == whole[1][-1]) == (a == b))


@given(big_ids, st.integers(1, 5))
def test_a_snapshot_is_named_by_all_its_tokens(tokens: list[int], chunk_len: int) -> None:
    lens = range(1, len(tokens) + 1)
    found = snapshot_keys(SCOPE, tokens, lens, chunk_len)
    assert [key.end for key in found] == list(lens) and len({key.digest for key in found}) == len(found)
    for length, key in zip(lens, found, strict=True):
        assert snapshot_keys(SCOPE, tokens[:length], [length], chunk_len) == [key]


def test_a_snapshot_is_named_by_where_it_was_compressed_before() -> None:
    cuts = [(), (7,), (3, 7), (7, 9)]
    (alone,), (seven,), (both,), (later,) = (snapshot_keys(SCOPE, range(9), [9], 4, cut) for cut in cuts)
    assert len({alone, seven, both}) == 3 and later == seven


def test_text_and_back() -> None:
    key = chunk_keys(SCOPE, range(3 * CHUNK), CHUNK)[2]
    assert Key.parse(key.text) == key and (key.start, key.end, key.num_tokens) == (32, 48, 16)
    other_spelling = key.text.replace("-20-30-", "-020-30-")
    for text in ("", "x", key.text + "0", key.text.upper(), other_spelling, key.text.replace("-20-30-", "-30-20-")):
        assert Key.parse(text) is None


@pytest.mark.parametrize("name", [field.name for field in fields(Binding)])
def test_every_fact_of_a_binding_changes_the_scope(name: str) -> None:
    value = getattr(BINDING, name)
    other: dict[str, Any] = {name: value + 1 if isinstance(value, int) else value + "x"}
    assert replace(BINDING, **other).scope != SCOPE


def test_a_tenant_is_not_readable_in_a_header() -> None:
    assert "acme" not in str(replace(BINDING, tenant="acme").facts())


def test_keys_are_the_same_in_every_process() -> None:
    program = (
        "from tests.store.common import BINDING; from kvfold.store.key import chunk_keys, snapshot_keys;"
        "print(chunk_keys(BINDING.scope, range(99), 16)[-1].text, snapshot_keys(BINDING.scope, range(99), [99], 16))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # this process has its own, random unless somebody set it
    found = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert found == f"{chunk_keys(SCOPE, range(99), 16)[-1].text} {snapshot_keys(SCOPE, range(99), [99], 16)}\n"
