"""Fidelity in a batch is that of two caches alone; what was kept is what the caches hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvfold.bench.answers import answer
from kvfold.bench.batched_eval import EvalJob
from kvfold.bench.diagnostics import OracleHits, jaccard, kept_mask, later_mass, layer_overlap, mask_of, oracle_hits
from kvfold.bench.fidelity import measure
from kvfold.bench.prompts import Prompt
from kvfold.bench.record import Mode
from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from tests.bench.runs import SMALL
from tests.tiny import build, prompt

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


TOKENS, LATER = prompt(200), prompt(30, seed=2)


def _mask(*heads: list[int], num_tokens: int = 8) -> torch.Tensor:
    return mask_of([torch.tensor(head, dtype=torch.int64) for head in heads], num_tokens)


def test_masks_hold_the_positions_of_each_head() -> None:
    found = _mask([0, 3], [], [2, 9], num_tokens=4)
    assert found.int().tolist() == [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]]


def test_hits_by_hand() -> None:
    """Head 0 keeps 0 and 3 where 3 and 1 matter: half. Head 1 keeps just what matters, four fifths of its mass."""
    kept = _mask([0, 3], [2, 3], num_tokens=4)
    mass = torch.tensor([[1.0, 3.0, 0.0, 4.0], [1.0, 1.0, 3.0, 5.0]])
    found = oracle_hits(kept, mass)
    assert found.hit_rate == pytest.approx((0.5 + 1.0) / 2)
    assert found.mass_kept == pytest.approx((5 / 8 + 8 / 10) / 2)
    assert found.share_kept == 0.5


def test_heads_of_different_length_are_judged_by_their_own() -> None:
    """One slot kept against the one best, three against the three best."""
    mass = torch.tensor([[5.0, 4.0, 3.0, 1.0], [5.0, 4.0, 3.0, 1.0]])
    assert oracle_hits(_mask([1], [0, 2, 3], num_tokens=4), mass).hit_rate == pytest.approx((0 + 2 / 3) / 2)


def test_everything_and_nothing() -> None:
    mass = torch.tensor([[5.0, 4.0, 3.0, 1.0]])
    assert oracle_hits(_mask([0, 1, 2, 3], num_tokens=4), mass) == OracleHits(1.0, 1.0, 1.0)
    assert oracle_hits(_mask([], num_tokens=4), mass) == OracleHits(0.0, 0.0, 0.0)
    assert oracle_hits(_mask([1], num_tokens=4), torch.zeros(1, 4)).mass_kept == 0.0


def test_jaccard_by_hand() -> None:
    found = jaccard(_mask([0, 1, 2], [1, 2, 3], [5], []))
    expected = [[1, 0.5, 0, 0], [0.5, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    assert torch.equal(found, torch.tensor(expected, dtype=torch.float32))


def test_layers_by_hand() -> None:
    """Layer 0: heads {0,1} and {1,2} share one of three. Layer 1: {0,1} equals one of them, a third of the other."""
    found = layer_overlap([_mask([0, 1], [1, 2]), _mask([0, 1])])
    third = 1 / 3
    assert torch.allclose(found, torch.tensor([[third, (1 + third) / 2], [(1 + third) / 2, 1.0]]))


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(InputError, match=r"shapes \(1, 8\) and \(2, 8\)"):
        oracle_hits(_mask([1]), torch.zeros(2, 8))
    with pytest.raises(InputError, match="2 layers to compare; give one or more as"):
        layer_overlap([_mask([1]), _mask([1], num_tokens=9)])
    with pytest.raises(InputError, match="0 layers"):
        layer_overlap([])


@torch.inference_mode()
def test_mass_is_that_of_the_models_own_attention_maps(model: Model) -> None:
    hf = build()
    hf.set_attn_implementation("eager")
    maps = hf(torch.tensor([TOKENS + LATER]), output_attentions=True).attentions
    found = later_mass(Runner(model.hf, model.spec, model.arena), TOKENS, LATER)
    assert list(found) == list(range(len(maps)))
    for mass_HN, map_1QTS in zip(found.values(), maps, strict=True):
        given_QN = map_1QTS[0, :, len(TOKENS) :, : len(TOKENS)].sum(1)
        expected_HN = given_QN.unflatten(0, (mass_HN.shape[0], -1)).sum(1)
        assert torch.allclose(mass_HN, expected_HN, rtol=1e-4, atol=1e-5)


def test_layers_with_a_sliding_window_are_left_out(shared: Callable[[str], Model]) -> None:
    model = shared("gemma3")
    found = later_mass(Runner(model.hf, model.spec, model.arena), TOKENS, LATER)
    assert tuple(found) == model.spec.compressible_layers == (1,)
    assert found[1].shape == (2, len(TOKENS))


def _hits(model: Model, policy: str) -> list[OracleHits]:
    runner = Runner(model.hf, model.spec, model.arena)
    masses = later_mass(runner, TOKENS, LATER)
    sequence = runner.new_sequence(Policy.parse(policy))
    runner.prefill([sequence], [TOKENS])
    runner.prefill([sequence], [LATER], compress=False)
    found = [oracle_hits(kept_mask(sequence, layer, len(TOKENS)), mass_HN) for layer, mass_HN in masses.items()]
    sequence.release()
    return found


def test_attention_of_the_past_foretells_better_than_chance(model: Model) -> None:
    """Random weights attend by content alone, so what was heavy stays heavy."""
    chosen, drawn = _hits(model, "h2o + 2x + protect(none)"), _hits(model, "random + 2x + protect(none)")
    for heavy, chance in zip(chosen, drawn, strict=True):
        assert heavy.share_kept == pytest.approx(chance.share_kept, abs=0.01)
        assert heavy.hit_rate > chance.hit_rate + 0.05
        assert heavy.mass_kept > chance.mass_kept + 0.05


def test_the_full_cache_hits_everything(model: Model) -> None:
    for found in _hits(model, "full"):
        assert (found.hit_rate, found.share_kept) == (1.0, 1.0)
        assert found.mass_kept == pytest.approx(1.0)
