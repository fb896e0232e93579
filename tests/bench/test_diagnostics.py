"""Fidelity in a batch is that of two caches alone; what was kept is what the caches hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvfold.bench.answers import answer
from kvfold.bench.batched_eval import EvalJob
from kvfold.bench.diagnostics import kept_mask, later_mass, oracle_hits
from kvfold.bench.fidelity import measure
from kvfold.bench.prompts import Prompt
from kvfold.bench.record import Mode
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from tests.bench.runs import SMALL
from tests.tiny import prompt

POLICIES = ("full", f"keydiff + {SMALL} + 6x", f"snapkv(window=8) + ada + int4 + {SMALL} + 4x")
PROMPT = Prompt(tuple(prompt(400)), tuple(prompt(20, seed=2)))
MODES: tuple[Mode, ...] = ("known", "unknown")


def _runner(model: Model) -> Runner:
    return Runner(model.hf, model.spec, model.arena)


def _jobs(mode: Mode) -> list[EvalJob]:
    return [EvalJob(PROMPT, mode, policy, 12, compares=True, diagnoses=True) for policy in POLICIES]


@pytest.mark.parametrize("mode", MODES)
def test_fidelity_is_that_of_two_caches_alone(model: Model, mode: Mode) -> None:
    runner, jobs = _runner(model), _jobs(mode)
    found = answer(runner, jobs)
    tokens = [PROMPT.last_id, *found[jobs[0]].token_ids]
    for job in jobs[1:]:
        pair = [runner.new_sequence(Policy.parse(policy)) for policy in ("full", job.policy)]
        runner.prefill_many(pair, PROMPT.compressed(mode))
        if PROMPT.rest(mode):
            runner.prefill(pair, [PROMPT.rest(mode)] * 2, compress=False)
        alone, batched = measure(runner, pair[0], pair[1], tokens), found[job].fidelity
        assert batched is not None and batched.num_tokens == alone.num_tokens == 12
        assert (batched.kl_nats, batched.bits_lost) == pytest.approx((alone.kl_nats, alone.bits_lost), rel=1e-3)
        assert batched.agreement == pytest.approx(alone.agreement) and batched.kl_nats > 0.01
        for sequence in pair:
            sequence.release()


@pytest.mark.parametrize("mode", MODES)
def test_choices_are_those_of_the_compressed_cache(model: Model, mode: Mode) -> None:
    runner, jobs = _runner(model), _jobs(mode)
    found = answer(runner, jobs)
    assert found[jobs[0]].kept is None  # the full cache chooses nothing
    tokens = PROMPT.compressed(mode)
    later = [*PROMPT.rest(mode), PROMPT.last_id, *found[jobs[0]].token_ids]
    mass = later_mass(runner, tokens, later)
    sequence = runner.new_sequence(Policy.parse(POLICIES[1]))
    runner.prefill([sequence], [tokens])
    expected = [oracle_hits(kept_mask(sequence, layer, len(tokens)), mass[layer]).hit_rate for layer in mass]
    sequence.release()
    kept_slots = found[jobs[1]].kept
    assert kept_slots is not None and kept_slots.layers == tuple(mass)
    assert kept_slots.hit_rate == pytest.approx(expected, abs=1e-4)
    assert len(kept_slots.overlap) == len(kept_slots.overlap[0]) == len(mass)


def test_a_step_is_timed_and_does_not_change_the_answer(model: Model) -> None:
    runner, (plain, timed) = (
        _runner(model),
        [EvalJob(PROMPT, "known", POLICIES[1], 6, diagnoses=each) for each in (False, True)],
    )
    found = answer(runner, [plain]) | answer(runner, [timed])
    assert found[plain].decode_ms is None and found[timed].decode_ms is not None
    assert found[plain].token_ids == found[timed].token_ids and len(found[plain].token_ids) == 6


def test_parts_of_a_batch_without_room_for_all_are_compared_too(model: Model) -> None:
    runner, jobs = _runner(model), _jobs("known")
    together = answer(runner, jobs)
    apart = answer(runner, [replace(job, num_bytes=model.arena.free_bytes) for job in jobs])
    for job in jobs:
        whole, part = together[job], apart[job]
        assert part.token_ids == whole.token_ids and (part.kept is None) == (whole.kept is None)
        assert whole.fidelity is not None and part.fidelity is not None
        assert part.fidelity.kl_nats == pytest.approx(whole.fidelity.kl_nats, rel=1e-3, abs=1e-9)
