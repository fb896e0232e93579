"""Room for a prompt beside those that run: what prompts hold already is not counted twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvfold.engine.runner import Runner
from kvfold.engine.scheduling import kv_bounds
from kvfold.engine.scheduling.kv_bounds import KVBounds
from kvfold.errors import OutOfPages
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from tests import tiny


@pytest.mark.parametrize("policy", ["full", "kvzip + global + 2x"])
def test_a_prompt_fits_to_the_byte(model: Model, policy: str) -> None:
    runner, parsed = Runner(model.hf, model.spec, model.arena), Policy.parse(policy)
    bounds = KVBounds(runner, parsed)
    reading = runner.new_sequence(parsed)
    runner.prefill([reading], [tiny.prompt(64, seed=1)], compress=False)
    held = reading.resident_bytes + reading.full_prompt_bytes
    assert held > 0
    free, whole = model.arena.free_bytes, bounds.prefill_bytes(96)
    task = SimpleNamespace(prompt_bytes=whole, sequence=reading)
    rest = whole - held + bounds.kv_bytes(reading.config.open_len)
    assert bounds.fits(free - rest, whole, [task], num_decoding=1)
    assert not bounds.fits(free - rest + 1, whole, [task], num_decoding=1)
    reading.release()


@pytest.mark.parametrize(("policy", "num_superblocks"), [("full", 60), ("int4", 30)])
def test_the_longest_sequence_fits_and_a_longer_one_does_not(policy: str, num_superblocks: int) -> None:
    small, parsed = tiny.ready("llama", capacity=num_superblocks * 4096), Policy.parse(policy)
    runner = Runner(small.hf, small.spec, small.arena)
    longest = KVBounds(runner, parsed).most_tokens(small.spec.max_positions)
    assert 32 < longest < small.spec.max_positions
    sequence = runner.new_sequence(parsed)
    runner.prefill([sequence], [tiny.prompt(longest)])
    sequence.release()
    with pytest.raises(OutOfPages):
        runner.prefill([runner.new_sequence(parsed)], [tiny.prompt(longest + 64)])


def test_bounds_that_are_kept_are_those_that_are_computed(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, policy = Runner(model.hf, model.spec, model.arena), Policy.parse("kvzip + global + 2x + int4")
    monkeypatch.setattr(kv_bounds, "_MOST_KNOWN", 3)  # few, so that some are dropped
    kept, lens = KVBounds(runner, policy), [16, 64, 256, 64, 1000, 16]
    for length in lens:
        fresh = KVBounds(runner, policy)
        assert (kept.kv_bytes(length), kept.prefill_bytes(length)) == (
            fresh.kv_bytes(length),
            fresh.prefill_bytes(length),
        )
    assert kept.prefill_bytes(256) > kept.kv_bytes(256)
    assert len(kept._known) <= 3
