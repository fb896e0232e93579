"""BatchedEval of a batch: the same answers as alone, one prefill for what is shared, ends where it should."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvfold.bench.answers import answer
from kvfold.bench.batched_eval import BatchedEval, EvalJob, fitting_batches
from kvfold.bench.prompts import Prompt
from kvfold.bench.record import TOO_SMALL
from kvfold.engine.cuda_graphs import CudaGraphs
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.arena import Arena
from tests.bench.runs import SMALL
from tests.tiny import prompt

CONTEXT = tuple(prompt(300))
POLICIES = ("full", f"keydiff + {SMALL} + 5x", f"h2o + int4 + {SMALL} + 4x")
PROMPTS = [Prompt(CONTEXT, tuple(prompt(10 + seed, seed=seed))) for seed in (2, 3, 4)]


@pytest.fixture
def runner(model: Model) -> Runner:
    return Runner(model.hf, model.spec, model.arena)


def _jobs(*prompts: Prompt) -> list[EvalJob]:
    return [EvalJob(each, mode, policy, 8) for each in prompts for mode in ("known", "unknown") for policy in POLICIES]


def test_a_batch_answers_like_each_job_alone(runner: Runner) -> None:
    jobs = _jobs(*PROMPTS)
    together = answer(runner, jobs)
    for job in jobs:
        alone = answer(runner, [job])[job]
        assert together[job].token_ids == alone.token_ids, job.policy
        assert together[job].stats == alone.stats
    assert len({outcome.token_ids for outcome in together.values()}) > len(PROMPTS)  # policies do differ


def test_a_shared_context_is_read_once_where_the_question_is_unknown(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, tuple[int, ...]]] = []
    prefill_many = runner.prefill_many

    def spy(sequences: Sequence[Any], tokens: Sequence[int]) -> object:
        read.append((len(sequences), tuple(tokens)))
        return prefill_many(sequences, tokens)

    monkeypatch.setattr(runner, "prefill_many", spy)
    answer(runner, _jobs(*PROMPTS))
    assert (len(POLICIES), CONTEXT) in read
    assert len(read) == 1 + len(PROMPTS)  # and each known question with its context


def test_questions_read_by_steps_are_answered_as_those_read_at_once(runner: Runner) -> None:
    pytest.importorskip("triton")
    prompts = [Prompt(CONTEXT[:60], tuple(prompt(length, seed=length))) for length in (4, 38)]  # past an open block
    jobs = [EvalJob(each, "unknown", policy, 3) for each in prompts for policy in ("full", f"keydiff + {SMALL} + 2x")]
    at_once = answer(runner, jobs)
    runner.graphs = CudaGraphs()
    by_steps = answer(runner, jobs)
    assert [by_steps[job].token_ids for job in jobs] == [at_once[job].token_ids for job in jobs]
    assert runner.graphs._steps == 4 + 5 + 3  # of eight tokens, of one, and of those that answer


def test_lanes_end_at_an_end_token_or_with_their_tokens(runner: Runner) -> None:
    job = EvalJob(PROMPTS[0], "known", "full", 8)
    whole = answer(runner, [job])[job].token_ids
    assert len(whole) == 8
    with BatchedEval(runner, [job]) as batch:
        batch.prefill()
        batch.decode(frozenset({whole[3]}))
        assert tuple(batch.all[0].token_ids) == whole[: whole.index(whole[3]) + 1]


def test_a_size_that_cannot_be_is_a_note(runner: Runner) -> None:
    jobs = [EvalJob(PROMPTS[0], "known", policy, 4) for policy in ("full", "snapkv + 200x")]
    found = answer(runner, jobs)
    assert [found[job].note for job in jobs] == ["", TOO_SMALL]
    assert found[jobs[1]].stats is None and found[jobs[0]].stats is not None


MIB = 2**20


@pytest.mark.parametrize(
    ("megabytes", "runs"),
    [
        ([], []),
        ([3, 3, 3], [[3, 3, 3]]),
        ([4, 4, 4, 1], [[4, 4], [4, 1]]),
        ([20, 1, 20], [[20], [1], [20]]),  # what does not fit by itself is tried all the same
    ],
)
def test_runs_hold_what_is_expected_to_fit(megabytes: list[int], runs: list[list[int]]) -> None:
    arena = Arena(11 * MIB)
    assert list(fitting_batches(megabytes, lambda count: count * MIB, arena)) == runs
