"""Sizes: exact numbers, absolute or relative, one text per size, and the floor below which none may go."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.errors import PolicyError, SizeError
from kvfold.policy.size import (
    BYTE_UNITS,
    Bytes,
    Floor,
    Greatest,
    Least,
    Ratio,
    Share,
    Size,
    SizeFacts,
    Tokens,
    check_floor,
)

FACTS = SizeFacts(
    num_tokens=1000, num_heads=4, bytes_per_slot=10.0, overhead_bytes=1000, open_len=16, full_bytes=160_000
)
FLOOR = Floor(sinks=4, recent=32, open_len=32)


@pytest.mark.parametrize(
    ("size", "slots"),
    [
        (Ratio(8), 125),
        (Ratio(3), 334),
        (Ratio(1), 1000),
        (Tokens(2048), 2048),
        (Bytes(5000), 116),  # (5000 - 1000) / 40 + 16
        (Bytes(5039), 116),
        (Bytes(5040), 117),
        (Share(25), 991),  # (40000 - 1000) / 40 + 16
        (Least((Ratio(8), Tokens(100))), 100),
        (Greatest((Ratio(8), Tokens(100))), 125),
    ],
)
def test_slots_per_head(size: Size, slots: int) -> None:
    assert size.slots_per_head(FACTS) == slots


def test_bytes_below_the_overhead_hold_no_slots() -> None:
    assert Bytes(100).slots_per_head(FACTS) == 0


def test_ratio_of_a_decimal_is_exact() -> None:
    for times, num_tokens, slots in [(1.1, 1100, 1000), (2.3, 69, 30), (2.3, 230, 100)]:
        assert Ratio(times).slots_per_head(replace(FACTS, num_tokens=num_tokens)) == slots


@given(st.integers(1, 10**6), st.integers(10, 500))
def test_bytes_hold_what_they_say(count: int, tenths: int) -> None:
    facts = replace(FACTS, bytes_per_slot=tenths / 10)
    slots = Bytes(count).slots_per_head(facts)
    used = (slots - facts.open_len) * facts.num_heads * facts.bytes_per_slot + facts.overhead_bytes
    one_more = used + facts.num_heads * facts.bytes_per_slot
    if slots > 0:
        assert used <= count + 1e-6 < one_more + 2e-6


@pytest.mark.parametrize(
    ("size", "is_absolute"),
    [
        (Ratio(8), False),
        (Share(10), False),
        (Tokens(8), True),
        (Bytes(8), True),
        (Least((Ratio(8), Share(10))), False),
        (Greatest((Ratio(8), Least((Share(10), Tokens(9))))), True),
    ],
)
def test_is_absolute(size: Size, is_absolute: bool) -> None:
    assert size.is_absolute is is_absolute


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (Ratio(8.0), "8x"),
        (Ratio(2.5), "2.5x"),
        (Tokens(2048), "2048tok"),
        (Share(12.5), "12.5%mem"),
        (Bytes(512_000_000), "512MB"),
        (Bytes(2**20), "1MiB"),
        (Bytes(1001), "1001B"),
        (Bytes.of(1.024, "MB"), "1024KB"),
        (Least((Ratio(8), Greatest((Tokens(1), Bytes(2000))))), "min(8x, max(1tok, 2KB))"),
    ],
)
def test_text(size: Size, text: str) -> None:
    assert str(size) == text


@given(st.integers(1, 10**18 - 1))
def test_text_of_bytes_is_exact(count: int) -> None:
    text = str(Bytes(count))
    unit = text.lstrip("0123456789")
    assert int(text.removesuffix(unit)) * BYTE_UNITS[unit] == count


def test_one_size_in_two_units_is_one_size() -> None:
    assert Bytes.of(1.5, "KB") == Bytes.of(1500, "B")
    assert Bytes.of(1, "MiB") == Bytes.of(1024, "KiB")


def test_refused_values() -> None:
    for make in (
        lambda: Ratio(0.5),
        lambda: Tokens(0),
        lambda: Tokens(2.5),  # type: ignore[arg-type]
        lambda: Share(0),
        lambda: Share(100.5),
        lambda: Bytes(0),
        lambda: Bytes(10**18),
        lambda: Bytes.of(0.5, "B"),
        lambda: Least((Ratio(8),)),
    ):
        with pytest.raises(PolicyError, match=r"^size .*: "):
            make()


def test_floor_names_the_smallest_possible() -> None:
    with pytest.raises(SizeError) as caught:
        check_floor(25, FLOOR, Ratio(8), 200)
    assert str(caught.value) == (
        "size 8x of 200 tokens is 25 slots per head, below the 68 that must fit "
        "(4 sinks, 32 recent, open block 32); the smallest possible is 68tok (2.9x here)"
    )


def test_floor_itself_fits() -> None:
    check_floor(68, FLOOR, Tokens(68), 200)
    with pytest.raises(SizeError):
        check_floor(67, FLOOR, Tokens(67), 200)


def test_an_absolute_size_is_a_bound_for_prompts_within_the_floor_too() -> None:
    """36 recent slots would keep a prompt of 60 tokens whole, in a cache that may hold 40."""
    check_floor(40, FLOOR, Tokens(40), 40)
    with pytest.raises(SizeError, match="size 40tok of 60 tokens is 40 slots per head, below the 68") as caught:
        check_floor(40, FLOOR, Tokens(40), 60)
    assert str(caught.value).endswith("the smallest possible is 68tok")


def test_prompt_within_the_floor_is_never_refused() -> None:
    check_floor(9, FLOOR, Ratio(8), 68)
    with pytest.raises(SizeError):
        check_floor(9, FLOOR, Ratio(8), 69)


@given(st.integers(69, 10**6))
def test_named_ratio_passes(num_tokens: int) -> None:
    with pytest.raises(SizeError) as caught:
        check_floor(1, FLOOR, Tokens(1), num_tokens)
    times = float(str(caught.value).split("(")[-1].removesuffix("x here)"))
    slots = Ratio(times).slots_per_head(replace(FACTS, num_tokens=num_tokens))
    check_floor(slots, FLOOR, Ratio(times), num_tokens)
