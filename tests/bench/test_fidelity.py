"""Exact values on hand-made logits; caches on a tiny model: none for the full cache, more for every bit less."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvfold.bench.fidelity import Fidelity, StudyResult, mean, measure, per_token, study
from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.session import Session
from tests.tiny import prompt

NUM_TOKENS, NUM_ANSWER = 300, 40


def _logits(*rows: list[float]) -> torch.Tensor:
    """Logits of given probabilities, moved by a constant that must not matter."""
    return torch.tensor(rows).log() + 3.0


def test_identical_logits_lose_nothing() -> None:
    logits_TV = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    assert per_token(logits_TV, logits_TV.clone(), [3, 1, 4, 1, 5]).summary() == Fidelity(5, 0.0, 1.0, 0.0)


def test_values_by_hand() -> None:
    """Row 0: KL = 1/2 ln 2 - 1/4 ln 2, one bit lost, another winner. Row 1: no difference."""
    full = _logits([0.5, 0.25, 0.25], [0.8, 0.1, 0.1])
    policy = _logits([0.25, 0.25, 0.5], [0.8, 0.1, 0.1])
    found = per_token(full, policy, [0, 2]).summary()
    assert found.num_tokens == 2
    assert found.kl_nats == pytest.approx((0.5 * math.log(2) - 0.25 * math.log(2)) / 2)
    assert found.agreement == 0.5
    assert found.bits_lost == pytest.approx(0.5)


def test_the_divergence_has_a_direction() -> None:
    """KL(p || q) of p = (3/4, 1/4) and q = (1/2, 1/2)."""
    p, q = _logits([0.75, 0.25]), _logits([0.5, 0.5])
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    backward = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert per_token(p, q, [0]).summary().kl_nats == pytest.approx(forward)
    assert per_token(q, p, [0]).summary().kl_nats == pytest.approx(backward)


def test_bits_are_gained_where_the_policy_likes_the_reference_better() -> None:
    assert per_token(_logits([0.25, 0.75]), _logits([0.5, 0.5]), [0]).summary().bits_lost == pytest.approx(-1.0)


def test_words_that_cannot_come_do_not_count() -> None:
    found = per_token(_logits([0.0, 0.5, 0.5]), _logits([0.5, 0.25, 0.25]), [1]).summary()
    assert found.kl_nats == pytest.approx(math.log(2))
    assert per_token(_logits([0.5, 0.5]), _logits([0.0, 1.0]), [1]).summary().kl_nats == math.inf


@contextmanager
def _caches(model: Model, *policies: str) -> Iterator[tuple[Runner, list[SequenceCache]]]:
    runner = Runner(model.hf, model.spec, model.arena)
    sequences = [runner.new_sequence(Policy.parse(policy)) for policy in policies]
    try:
        runner.prefill_many(sequences, prompt(NUM_TOKENS))
        yield runner, sequences
    finally:
        for sequence in sequences:
            sequence.release()


def _measured(model: Model, policy: str) -> Fidelity:
    with _caches(model, "full", policy) as (runner, (full, compressed)):
        found = measure(runner, full, compressed, prompt(NUM_ANSWER, seed=2))
        assert full.logical_len == compressed.logical_len == NUM_TOKENS + NUM_ANSWER - 1
    return found


def test_the_full_cache_loses_nothing_against_itself(model: Model) -> None:
    found = _measured(model, "full")
    assert found.num_tokens == NUM_ANSWER - 1 and found.agreement == 1.0
    assert abs(found.kl_nats) < 1e-6 and abs(found.bits_lost) < 1e-5


def test_every_bit_less_loses_more(model: Model) -> None:
    by_codec = {codec: _measured(model, codec) for codec in ("int8", "int4", "int2")}
    losses = [by_codec[codec].kl_nats for codec in ("int2", "int4", "int8")]
    assert losses[0] > 3 * losses[1] > 9 * losses[2] > 0
    assert by_codec["int2"].agreement < by_codec["int8"].agreement


def test_steps_equal_rows_of_the_model_itself(model: Model) -> None:
    """What `measure` saw of an evicting policy is what `compare` says of the two rows of logits."""
    answer = prompt(NUM_ANSWER, seed=2)
    with _caches(model, "full", "keydiff + 4x") as (runner, sequences):
        branches = [sequence.fork() for sequence in sequences]
        found = measure(runner, sequences[0], sequences[1], answer)
        rows = [torch.cat([runner.decode([branch], [token]) for token in answer[:-1]]) for branch in branches]
        for branch in branches:
            branch.release()
    expected = per_token(rows[0], rows[1], answer[1:]).summary()
    assert found.kl_nats == pytest.approx(expected.kl_nats, rel=1e-4) and found.kl_nats > 0.01
    assert found.bits_lost == pytest.approx(expected.bits_lost, rel=1e-3, abs=1e-4)
    assert found.agreement == expected.agreement


def test_caches_of_different_texts_are_refused(model: Model) -> None:
    with _caches(model, "full", "int4") as (runner, (full, compressed)):
        runner.decode([full], [1])
        with pytest.raises(InputError, match="have read 301 and 300 tokens"):
            measure(runner, full, compressed, [1, 2])
        with pytest.raises(InputError, match="the reference has 1 tokens"):
            measure(runner, full, compressed, [1])


TEXT = " ".join(f"line {number} tells of the sea." for number in range(12))


def read(model: Model, policy: str, template: str | None) -> Session:
    session = Session(model, policy, page_size=4, open_len=8, template="auto" if template else None)
    return session.extend(messages=[{"role": "system", "content": TEXT}]) if template else session.extend(TEXT)


@pytest.mark.parametrize("template", ["auto", None])
def test_the_whole_cache_follows_itself(model: Model, template: str | None) -> None:
    with read(model, "full", template) as full, read(model, "full", template) as other:
        before = list(full.token_ids), full.cache.logical_len
        found = study(full, other, ["Who?", "When and where?"], 10)
        assert (full.token_ids, full.cache.logical_len) == before
        with full.fork() as asked:
            expected = asked.extend("Who?", compress=False).generate(max_new_tokens=10).text
    assert [item.question for item in found] == ["Who?", "When and where?"]
    assert found[0].answer == expected
    for item in found:  # without a template, the first word follows the question, which both have read
        assert item.fidelity.num_tokens == (10 if template else 9)
        assert item.fidelity.agreement == 1.0 and item.fidelity.kl_nats == pytest.approx(0.0, abs=1e-6)


def test_a_compressed_cache_does_not(model: Model) -> None:
    with read(model, "full", "auto") as full, read(model, "knorm + 4x", "auto") as compressed:
        (item,) = study(full, compressed, ["Who?"], 10)
    assert item.fidelity.kl_nats > 0.01


def test_sessions_must_have_read_the_same(model: Model) -> None:
    told = pytest.raises(InputError, match="compare sessions that have read the same")
    with read(model, "full", "auto") as full, read(model, "full", None) as other, told:
        study(full, other, ["Who?"], 10)


def test_the_mean_is_over_tokens() -> None:
    rows = [StudyResult("a", "", Fidelity(1, 4.0, 0.0, 8.0)), StudyResult("b", "", Fidelity(3, 0.0, 1.0, 0.0))]
    assert mean(rows) == Fidelity(4, 1.0, 0.75, 2.0)
