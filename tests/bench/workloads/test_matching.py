"""Matching replies with answers, on replies made by hand, as the sources define it."""

from __future__ import annotations

import pytest

from kvfold.bench.workloads.metrics import (
    first_digits,
    first_number,
    last_digits,
    match_all,
    match_part,
    split_words,
)


def test_match_all_is_the_share_found_in_whatever_case() -> None:
    assert match_all(("Oak", "elm", "ash", "yew"), "1. oak 2. ELM 3. Ashes") == 0.75
    assert match_all(("12", "34"), "about 1234") == 1  # substrings count
    assert match_all(("12",), "1 2") == 0


def test_match_part_is_whether_any_is_found() -> None:
    assert match_part(("Denver Broncos", "Broncos"), "the broncos won") == 1
    assert match_part(("Denver Broncos", "the Broncos"), "Denver\x00Broncos") == 0


def test_control_characters_are_line_breaks() -> None:
    assert match_all(("one\ntwo",), "one\x07two") == 1


def test_first_and_last_digits_are_read_as_written() -> None:
    assert first_digits("key 00412, not 9") == "00412" and last_digits("from <7> to <0042>.") == "0042"
    assert first_digits("none") == last_digits("none") == ""
    assert first_digits("-12.5") == "12"


@pytest.mark.parametrize(("reply", "number"), [("is 49.5.", 49.5), ("49.", 49), ("a 7 or 8.2", 7), ("none", None)])
def test_first_number_may_be_a_decimal(reply: str, number: float | None) -> None:
    assert first_number(reply) == number


def test_words_are_freed_of_what_wraps_them() -> None:
    assert split_words('{"ab-1": "cd-2"},\nnot, it\'s: x!?') == ["ab-1", "cd-2", "not", "it", "s", "x"]
