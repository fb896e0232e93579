"""Passes that pause: results are bitwise those of passes in one go, whatever runs between; ended ones leave nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.engine.resumable import Resumable
from kvfold.engine.runner import Runner
from kvfold.errors import OutOfPages
from kvfold.models.loader import Model
from kvfold.models.spec import attention_modules, decoder_layers
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.serialize import dump
from kvfold.yielding import yield_point
from tests import tiny
from tests.engine.runs import make_runner, make_sequence

CHUNK = 64
POLICIES = (
    "full",
    "keydiff + 4x",
    "snapkv(window=8) + ada + 4x + int8",
    "kvzip(chunk=64) + global + 4x + int4",
    "kvzip_plus(chunk=64) + global + 4x",  # hooks the hidden states
    "kvzip(chunk=64) + global + 3x + fit(tokens=20)",
    "fastkv(layer=1, rate=0.5) + keydiff + 4x",
    "knorm + 64tok + between_chunks(chunk=32)",
)
EVERY = 11  # pauses, a step of the reply
PROMPTS = (tiny.prompt(200, seed=1), tiny.prompt(190, seed=2))


def always() -> bool:
    return True


def passing(runner: Runner, policy: str, tokens: list[int]) -> tuple[SequenceCache, Resumable[Tensor]]:
    sequence = make_sequence(runner, policy)
    return sequence, Resumable(partial(runner.prefill, [sequence], [tokens]), always)


def state(sequence: SequenceCache, logits_BV: Tensor) -> dict[str, Any]:
    return {"logits": logits_BV, **{name: tensor.clone() for name, tensor in dump(sequence).items()}}


def in_one_go(runner: Runner, policy: str, tokens: list[int]) -> dict[str, Any]:
    sequence = make_sequence(runner, policy)
    found = state(sequence, runner.prefill([sequence], [tokens]))
    sequence.release()
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def assert_unpatched(model: Model) -> None:
    assert not any("forward" in layer.__dict__ for layer in decoder_layers(model.hf))
    assert not any(module._forward_pre_hooks for module in attention_modules(model.hf))


@pytest.mark.parametrize("case", [*(("llama", policy) for policy in POLICIES), ("gemma3", POLICIES[0])], ids=str)
def test_two_passes_and_a_reply_take_turns(shared: Callable[[str], Model], case: tuple[str, str]) -> None:
    family, policy = shared(case[0]), case[1]
    runner = make_runner(family, CHUNK)
    expected = [in_one_go(runner, policy, tokens) for tokens in PROMPTS]
    reply = make_sequence(runner, "full")
    last = runner.prefill([reply], [tiny.prompt(9)])
    made = [passing(runner, policy, tokens) for tokens in PROMPTS]
    waiting, num_pauses = [one for _, one in made], 0
    for one in cycle(list(waiting)):
        if not waiting:
            break
        if one in waiting and one.resume():
            waiting.remove(one)
        assert_unpatched(family)
        num_pauses += 1
        if num_pauses % EVERY == 0:
            last = runner.decode([reply], [int(last.argmax())])
    assert num_pauses >= 2 * family.spec.num_layers, "one between any two layers"
    for (sequence, one), wanted in zip(made, expected, strict=True):
        assert_same(state(sequence, one.result), wanted)
        sequence.release()
    alone = make_sequence(runner, "full")
    logits = runner.prefill([alone], [tiny.prompt(9)])
    for _ in range(num_pauses // EVERY):
        logits = runner.decode([alone], [int(logits.argmax())])
    assert torch.equal(logits, last), "the reply is that of a run alone"
    alone.release()
    reply.release()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pass_that_is_abandoned_anywhere_leaves_its_sequence_as_it_was(model: Model, policy: str) -> None:
    runner = make_runner(model, CHUNK)
    expected = in_one_go(runner, policy, PROMPTS[0])
    sequence, one = passing(runner, policy, PROMPTS[0])
    count = sum(1 for _ in _pauses(one))
    sequence.release()
    for stop in range(1, count, max(1, count // 5)):
        sequence, one = passing(runner, policy, PROMPTS[0])
        for _ in range(stop):
            assert not one.resume()
        one.abandon()
        assert_unpatched(model)
        if sequence.committed_len == 0:  # but for chunks that were finished, or a write that had begun
            assert_same(state(sequence, runner.prefill([sequence], [PROMPTS[0]])), expected)
        sequence.release()
        assert model.arena.used_bytes == 0


def _pauses(one: Resumable[Tensor]) -> Iterator[None]:
    while not one.resume():
        yield


def test_what_a_pass_raises_is_raised_in_its_caller() -> None:
    small = tiny.ready("llama", capacity=24 * 4096)
    runner = make_runner(small, CHUNK)
    sequence, one = passing(runner, "full", tiny.prompt(600))
    with pytest.raises(OutOfPages):
        while not one.resume():
            pass
    assert sequence.committed_len == 0
    assert_unpatched(small)
    sequence.release()
    assert small.arena.used_bytes == 0


def test_without_a_switch_a_yield_point_is_nothing_and_an_abandoned_one_never_starts() -> None:
    yield_point()
    ran: list[int] = []
    one = Resumable(partial(ran.append, 1), always)
    one.abandon()
    assert not ran


def test_a_part_that_must_be_finished_is_finished() -> None:
    done: list[str] = []

    def work() -> None:
        done.append("begun")
        yield_point(may_end=False)
        done.append("finished")
        yield_point()
        done.append("more")

    one = Resumable(work, always)
    assert not one.resume()
    one.abandon()
    assert done == ["begun", "finished"]


def test_rotary_frequencies_of_a_second_reading_are_its_own(shared: Callable[[str], Model]) -> None:
    """Those that depend on the length grow with the positions after the prompt; a reply meanwhile has other ones."""
    model = shared("dynamic_rope")
    runner = make_runner(model, CHUNK)
    policy = "kvzip(chunk=64) + global + 4x"
    expected = in_one_go(runner, policy, PROMPTS[0])
    reply = make_sequence(runner, "full")
    last = runner.prefill([reply], [tiny.prompt(9)])
    sequence, one = passing(runner, policy, PROMPTS[0])
    for _ in _pauses(one):
        last = runner.decode([reply], [int(last.argmax())])
    assert_same(state(sequence, one.result), expected)
    sequence.release()
    reply.release()
