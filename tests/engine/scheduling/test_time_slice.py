"""How long prompts are read between two steps: a share of what steps take, within bounds."""

from __future__ import annotations

import pytest
import torch

from kvfold.engine.scheduling.prefill_manager import TimeSlice


@pytest.mark.parametrize(
    ("step_s", "length_s"), [(0.001, 0.02), (0.01, 0.04), (0.05, 0.2), (0.1, 0.4), (0.5, 1.0), (5.0, 1.0)]
)
def test_a_slice_follows_the_steps(step_s: float, length_s: float) -> None:
    now = [7.0]
    found = TimeSlice(lambda: now[0], torch.device("cpu"))
    assert found.length_s == pytest.approx(0.2), "before the first step"
    found.stepped(step_s)
    assert found.length_s == pytest.approx(length_s)
    found.begin()
    assert not found.is_over()
    now[0] += 1.01 * length_s
    assert found.is_over()


def test_a_slice_of_no_length_is_over_at_once() -> None:
    found = TimeSlice(lambda: 3.0, torch.device("cpu"), 0.0)
    found.stepped(1.0)
    found.begin()
    assert found.is_over()
