"""Equations inside a text: which are found, which hold, and what is left alone."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold.recurse.arithmetic import equations, number_text


def _found(text: str) -> list[tuple[str, bool]]:
    return [(str(equation), equation.is_right) for equation in equations(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So 12 * 3 = 36.", [("12 * 3 = 36", True)]),
        ("12 * 3 = 35, and 35 / 2 = 17.5", [("12 * 3 = 35", False), ("35 / 2 = 17.5", True)]),
        ("10 / 3 = 3.33 and 10 / 3 = 3.34", [("10 / 3 = 3.33", True), ("10 / 3 = 3.34", False)]),
        ("7 / 2 = 4, 7 / 2 ≈ 4", [("7 / 2 = 4", False), ("7 / 2 = 4", True)]),
        ("0.1 + 0.2 = 0.3", [("0.1 + 0.2 = 0.3", True)]),
        ("5 - 8 = -3; -10 / 3 = -3.33", [("5 - 8 = -3", True), ("-10 / 3 = -3.33", True)]),
        ("(2 + 3) * 4 = 20 = 4 * 5 = 21", [("(2 + 3) * 4 = 20", True), ("20 = 4 * 5", True), ("4 * 5 = 21", False)]),
        ("1,200 + 300 = 1,500 dollars", [("1,200 + 300 = 1,500", True)]),
        ("$5 + $3.50 = $8.50", [("$5 + $3.50 = $8.50", True)]),
        ("20% * 50 = 10", [("20% * 50 = 10", True)]),
        ("2^10 = 1024, 2**3 == 9, 7 // 2 = 3", [("2^10 = 1024", True), ("2**3 = 9", False), ("7 // 2 = 3", True)]),
        ("12 × 3 = 36, 12 x 3 = 37, 8 ÷ 2 = 4", [("12 × 3 = 36", True), ("12 * 3 = 37", False), ("8 ÷ 2 = 4", True)]),
        (r"\(3 \times 4 = 13\)", [("3 * 4 = 13", False)]),
        ("**12 * 3 = 36**", [("12 * 3 = 36", True)]),
        ("So 2 + 2 = **5**, **2 + 2** = 4", [("2 + 2 = 5", False), ("2 + 2 = 4", True)]),
        ("36 = 12 * 3", [("36 = 12 * 3", True)]),
        ("Day 1 = 5 + 3 = 8", [("5 + 3 = 8", True)]),
        ("f(3) = 3 + 4 = 7", [("3 + 4 = 7", True)]),
        ("1 / 0 = 3", [("1 / 0 = 3", False)]),
        ("- 3 + 4 = 7\n* 3 + 4 = 8\n1) 2 + 2 = 4", [("3 + 4 = 7", True), ("3 + 4 = 8", False), ("2 + 2 = 4", True)]),
        ("1. 2 + 2 = 4\na) 2 + 2 = 5\n-3 + 5 = 2", [("2 + 2 = 4", True), ("2 + 2 = 5", False), ("-3 + 5 = 2", True)]),
        ("(since 3 + 4 = 8) and (3 + 4 = 7)", [("3 + 4 = 8", False), ("3 + 4 = 7", True)]),
        ("10 – 3 = 7", [("10 – 3 = 7", True)]),
        ("20% + 30% = 50%", [("20% + 30% = 50%", True)]),
    ],
)
def test_equations_are_computed(text: str, expected: list[tuple[str, bool]]) -> None:
    assert _found(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "y - 3 * 2 = 4",
        "2y + 3 = 7",
        "3 + 4 = 7 + y",
        "x1 + 2 = 5",
        "3 (4) = 5",
        "2024-01-05",
        "100 - 20% = 80",
        "10:30 + 1:15 = 11:45",
        "1 1/2 + 1/2 = 3",
        "7 % 2 = 1",
        "3² + 4² = 26",
        "1 + 1 >= 3",
        "9 ** 9 ** 9 = 1",
        "(1 / 9 ** 64) ** 64 ** 64 = 0",
        "__import__('os').system('x') = 1 + 1",
        "1 + 1 =\n3",
        "1,5 + 1 = 2,5",
        "1.234,50 + 1 = 1.235,50",
        "12:30 + 1 = 2",
        "y**2 + 1 = 5",
        "2 + 2 = 2**y",
        "(9**64 / 7)**64 = 5",
        "(9**64 * 9**16)**64 = 5",
        "9**64 * 9**64 * 9**64 * 9**64 / 7 = 5",
    ],
)
def test_what_is_not_certainly_arithmetic_is_left_alone(text: str) -> None:
    assert _found(text) == []


@given(st.integers(-999, 999), st.sampled_from("+-*"), st.integers(0, 999), st.integers(-2000, 2000))
def test_integers_agree_with_python(left: int, sign: str, right: int, claimed: int) -> None:
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    assert _found(f"{left} {sign} {right} = {value}")[0][1]
    assert _found(f"{left} {sign} {right} = {claimed}")[0][1] == (claimed == value)


@given(st.text("0123456789+-*/()=. ,%xy\n^", max_size=60))
def test_any_text_is_read_without_an_error(text: str) -> None:
    for equation in equations(text):
        assert equation.value is None or isinstance(equation.value, Fraction)


@pytest.mark.parametrize("text", ["1 + " * 50_000, " " * 100_000, "(" * 50_000 + "= 1", "9" * 50_000 + " + 1 = 2"])
def test_texts_of_50_000_tokens_are_read_to_their_end(text: str) -> None:
    """A scan that is quadratic in the text would take minutes."""
    assert _found(text + "\n1 + 1 = 3") == [("1 + 1 = 3", False)]


def test_numbers_are_written_as_people_do() -> None:
    assert [number_text(Fraction(*pair)) for pair in ((36, 1), (35, 2), (10, 3))] == ["36", "17.5", "3.33333"]
