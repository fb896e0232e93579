"""Rendering helpers: units, and the picture of kept positions."""

from __future__ import annotations

import pytest

from kvfold.cli.show import MAX_BINS, kept_lines
from kvfold.policy.size import bytes_text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (23_547_840, "23.5 MB"),
        (999_499_999, "999.5 MB"),
        (2.5e12, "2500.0 GB"),
    ],
)
def test_bytes(number: float, text: str) -> None:
    assert bytes_text(number) == text


def test_a_short_prompt_has_a_bin_per_token() -> None:
    lines = kept_lines([[[0, 1, 5], [0, 5]], [[0], [0, 1, 2, 3, 4, 5]]], 6)
    assert lines == ["layer  0 |█▄   █| 2..3, mean 2", "layer  1 |█▄▄▄▄▄| 1..6, mean 4"]


def test_a_single_slot_among_many_is_seen() -> None:
    (line,) = kept_lines([[[50_000]]], 100_000)
    picture = line.split("|")[1]
    assert len(picture) == MAX_BINS
    assert picture.strip() == "▁"
    assert picture.index("▁") == MAX_BINS // 2
