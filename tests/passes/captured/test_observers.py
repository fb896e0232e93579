"""Observations of captured steps lie in the lanes and belong to the sequences: nobody loses or mixes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kvfold.compression.observe import ObserverSnapshot
from kvfold.engine.cuda_graphs import CudaGraphs
from kvfold.engine.generate import generate
from kvfold.engine.output_processor import Request
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from tests.engine.runs import make_runner, make_sequence
from tests.passes.captured.test_step import same_observations
from tests.tiny import prompt, ready

POLICIES = ("h2o + 64tok + protect(sinks=2, recent=4)", "snapkv(window=4) + 64tok + protect(sinks=2, recent=4)")

Make = Callable[[int], list[SequenceCache]]


@pytest.fixture(scope="module")
def model() -> Model:
    return ready("llama")


@pytest.fixture
def runner(model: Model) -> Runner:
    """The plain way."""
    return make_runner(model)


@pytest.fixture
def captured(model: Model) -> Runner:
    """The way of captured steps."""
    found = make_runner(model)
    found.graphs = CudaGraphs()
    return found


@pytest.fixture(params=POLICIES)
def make(runner: Runner, request: pytest.FixtureRequest) -> Iterator[Make]:
    """So many sequences of a policy, filled with the same prompts every time; released in the end."""
    made: list[SequenceCache] = []

    def filled(count: int) -> list[SequenceCache]:
        sequences = [make_sequence(runner, request.param, page_size=16, open_len=8) for _ in range(count)]
        runner.prefill(sequences, [prompt(70 + 20 * i, seed=i) for i in range(count)])
        made.extend(sequences)
        return sequences

    yield filled
    for sequence in made:
        sequence.release()


def check(plain: list[SequenceCache], fast: list[SequenceCache]) -> None:
    for mine, theirs in zip(fast, plain, strict=True):
        same_observations(mine, theirs)


def test_lanes_are_left_taken_by_others_and_taken_again(runner: Runner, captured: Runner, make: Make) -> None:
    plain, fast = make(4), make(4)
    for number, batch in enumerate(([0, 1], [2], [2, 3], [1, 0], [3, 0, 1], [0, 1], [2], [0])):
        ids = [3 * number + i for i in batch]
        runner.decode([plain[i] for i in batch], ids)
        captured.decode([fast[i] for i in batch], ids)
        assert all(fast[i].observed.is_live for i in batch)
        check(plain, fast)


def test_captured_and_plain_steps_alternate(runner: Runner, captured: Runner, make: Make) -> None:
    plain, fast = make(1), make(1)
    for token in range(24):
        runner.decode(plain, [token])
        (captured if token % 5 < 3 else runner).decode(fast, [token])
        check(plain, fast)


def test_a_fork_goes_on_with_a_copy(runner: Runner, captured: Runner, make: Make) -> None:
    plain, fast = make(1), make(1)
    for token in range(3):
        runner.decode(plain, [token])
        captured.decode(fast, [token])
    branch = fast[0].fork()
    captured.decode(fast, [3])
    check(plain, [branch])
    branch.release()


def test_what_was_observed_can_be_gone_back_to(runner: Runner, captured: Runner, make: Make) -> None:
    plain, fast = make(1), make(1)
    captured.decode(fast, [1])
    runner.decode(plain, [1])
    undo = ObserverSnapshot(fast)
    captured.decode(fast, [2], commit=[False])
    undo.restore()
    fast[0].open.rollback()
    for token in (None, 3):
        if token is not None:
            captured.decode(fast, [token])
            runner.decode(plain, [token])
        check(plain, fast)


def test_mass_of_a_slot_that_rolled_back_is_not_its_successors(runner: Runner, captured: Runner, make: Make) -> None:
    plain, fast = make(1), make(1)
    for which, (sequence,) in ((runner, plain), (captured, fast)):
        which.decode([sequence], [1], commit=[False])
        sequence.open.rollback()
        which.decode([sequence], [2])
    check(plain, fast)


def test_a_graph_that_is_captured_notes_nothing(model: Model, runner: Runner, captured: Runner, make: Make) -> None:
    plain, fast = make(2), make(2)
    for token in range(3):
        runner.decode(plain, [token, token])
        captured.decode(fast, [token, token])
    assert captured.graphs is not None
    (step,) = captured.graphs._captured.values()
    with torch.inference_mode():
        step.inbox_BI[:, -1] = -1
        step._forward(model.hf, None)
    check(plain, fast)


def test_drafts_are_not_noted_before_they_are_kept(runner: Runner, captured: Runner, make: Make) -> None:
    plain, fast = make(1), make(1)
    runner.decode(plain, [5])
    captured.decode(fast, [5])
    captured.verify(fast, [[6]])
    captured.verify(fast, [[6, 7, 8]])
    check(plain, fast)


def test_a_stop_string_takes_observations_back(model: Model, runner: Runner, captured: Runner, make: Make) -> None:
    (plain,), (fast,), (free,) = make(1), make(1), make(1)
    logits = torch.linspace(0, 1, model.spec.vocab_size)
    trial = Request(free, logits, 12)
    list(generate(runner, [trial], model.tokenizer))
    stop = model.tokenizer.decode(trial.token_ids[5:8])
    for which, sequence in ((runner, plain), (captured, fast)):
        request = Request(sequence, logits, 12, stop=(stop,))
        list(generate(which, [request], model.tokenizer))
        assert request.reason == "stop" and sequence.open.fill == sequence.open.committed
    assert fast.observed.layers[0].tensors()
    check([plain], [fast])
