"""Filling prompts: the nearest length of all, few counts, and text that is cut after any word."""

from __future__ import annotations

from itertools import accumulate, count, cycle, islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.bench.workloads import Sample, Setting
from kvfold.bench.workloads.fill import Supply, Text, even_depth, fit
from kvfold.errors import InputError


def of(text: str) -> Sample:
    return Sample("task", 0, text, "", ("a",), 1)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=50), st.integers(1, 4), st.integers(0, 1000))
def test_nearest_of_all_counts(units: list[int], least: int, more: int) -> None:
    """Against trying them all; units of any sizes, in characters."""
    sizes = list(accumulate(islice(cycle(units), least + more + 1), initial=0))
    length = sizes[least] + more
    found = fit(
        Setting(length, 0, len), lambda num: of("x" * sizes[num] if num < len(sizes) else "x" * 10**5), least=least
    )
    assert abs(len(found.text) - length) == min(abs(size - length) for size in sizes[least:])


def test_counting_tokens_is_rare() -> None:
    calls = []

    def counted(text: str) -> int:
        calls.append(text)
        return len(text)

    assert len(fit(Setting(100_000, 0, counted), lambda num: of("word " * num)).text) == 100_000
    assert len(calls) < 16


def test_lengths_that_cannot_be_had_are_refused() -> None:
    with pytest.raises(InputError, match="prompts of 9 tokens are too short for task; give a length of at least 10"):
        fit(Setting(9, 0, len), lambda num: of("x" * num), least=10)
    with pytest.raises(InputError, match="prompts of 21 tokens are too long for task; what was given is enough for 20"):
        fit(Setting(21, 0, len), lambda num: of("x" * num), most=20)
    assert len(fit(Setting(20, 0, len), lambda num: of("x" * num), most=20).text) == 20
    assert len(fit(Setting(10, 0, len), lambda num: of("x" * num), least=10, most=10).text) == 10


def test_text_is_cut_after_any_word() -> None:
    text = Text(cycle(["One two three.", "Four five."]))
    assert text.take(4) == ["One two three.", "Four"]
    assert text.take(1) == ["One"]
    assert text.take(3) == ["One two three."]
    assert text.take(7) == ["One two three.", "Four five.", "One two"]


def test_a_supply_only_grows() -> None:
    supply = Supply(count())
    assert supply.take(3) == [0, 1, 2] and supply.take(1) == [0] and supply.take(4) == [0, 1, 2, 3]


def test_depths_are_even() -> None:
    assert [even_depth(i) for i in range(11)] == [0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95, 0.05]
