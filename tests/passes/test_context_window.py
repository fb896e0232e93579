"""One warning when a sequence leaves the positions its model was trained on; none where gaps close up."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvfold.core import ModelSpec
from kvfold.errors import KvfoldWarning
from kvfold.pages.sequence import SequenceCache
from tests.pages.tiny import fill, new_sequence, step, tiny_spec

SPEC = replace(tiny_spec(), max_positions=40)
STREAMING = "streaming(sinks=2) + 20tok + protect(sinks=2, recent=3)"


def num_warnings(act: Callable[[], None]) -> int:
    """How often anything warned, whatever was told before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    assert all(item.category is KvfoldWarning for item in caught)
    return len(caught)


def read_and_decode(sequence: SequenceCache) -> list[int]:
    """Warnings of four reads of 15 tokens, then of 30 steps."""
    reads = [num_warnings(lambda: fill(sequence, 15)) for _ in range(4)]
    return [*reads, sum(num_warnings(lambda: step(sequence)) for _ in range(30))]


def test_the_read_that_passes_the_window_warns() -> None:
    assert read_and_decode(new_sequence("full", SPEC)) == [0, 0, 1, 0, 0]


@pytest.mark.parametrize("policy", ["full", STREAMING])
def test_the_step_that_passes_the_window_warns_once(policy: str) -> None:
    """Evicting does not help where kept keys stay at their positions."""
    sequence = new_sequence(policy, SPEC)
    fill(sequence, 38)
    found = [num_warnings(lambda: step(sequence)) for _ in range(20)]
    assert found == [0, 0, 1] + [0] * 17


def test_the_last_trained_position_does_not_warn() -> None:
    sequence = new_sequence("full", SPEC)
    assert num_warnings(lambda: fill(sequence, 40)) == 0


def test_closed_gaps_at_a_bounded_size_never_warn() -> None:
    assert read_and_decode(new_sequence(f"{STREAMING} + slot", SPEC)) == [0, 0, 0, 0, 0]


def test_closed_gaps_warn_once_too_much_is_stored() -> None:
    """`slot` measures distances in slots: 41 stored ones are too far, whatever their positions."""
    sequence = new_sequence("knorm + 2x + protect(sinks=1, recent=1) + slot", SPEC)
    fill(sequence, 30)
    fill(sequence, 20)
    assert max(sequence.stored_lens(0)) < 25
    found = [num_warnings(lambda: step(sequence)) for _ in range(30)]
    stored = sequence.stored_lens(0)[0] + sequence.open.fill
    assert sum(found) == 1
    assert found.index(1) == len(found) - (stored - 40)


def without_rope(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, rope=None) for layer in spec.layers))


@pytest.mark.parametrize(
    "spec",
    [
        without_rope(SPEC),
        replace(SPEC, max_positions=0),
        replace(tiny_spec(sliding={0: 8, 1: 8}), max_positions=40),
    ],
)
def test_no_trained_window_no_warning(spec: ModelSpec) -> None:
    """Learned nowhere, unknown, or never looked across."""
    assert read_and_decode(new_sequence("full", spec)) == [0, 0, 0, 0, 0]


def test_the_warning_says_what_to_do() -> None:
    with pytest.warns(KvfoldWarning, match=r'passes 40 positions, which is what tiny was .*1024tok \+ slot"$'):
        fill(new_sequence("full", SPEC), 41)
