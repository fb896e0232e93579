"""Short prefills behind a stored prefix, all layers in one call: what they give is what each gives layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.core import has_amx_kernels
from kvfold.engine.runner import Runner
from kvfold.models.cpu_decoder import Decoder
from kvfold.models.loader import Model
from kvfold.models.pass_cache import PrefillCache
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy
from tests.tiny import prompt, ready_bf16

pytestmark = pytest.mark.skipif(not has_amx_kernels(), reason="needs AMX and numba")

PREFIX = 300  # two blocks of slots, and a part of one
LENS = [3, 17, 1, 130, 17]


@pytest.fixture
def model() -> Model:
    return ready_bf16()


@pytest.fixture
def runner(model: Model) -> Runner:
    return Runner(model.hf, model.spec, model.arena, joins=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of state of the calls that ran all layers."""
    found, run = [], Decoder.run

    def counted(self: Decoder, hidden: Tensor, angles: Any, state: Any) -> Tensor:
        found.append(type(state).__name__)
        return run(self, hidden, angles, state)

    monkeypatch.setattr(Decoder, "run", counted)
    return found


def prefix(runner: Runner, policy: str = "full", seed: int = 0) -> SequenceCache:
    found = runner.new_sequence(Policy.parse(policy))
    runner.prefill([found], [prompt(PREFIX, seed=seed)], compress=False)
    return found


def questions(lens: Sequence[int]) -> list[list[int]]:
    return [prompt(length, seed=9 + index) for index, length in enumerate(lens)]


def asked(runner: Runner, first: SequenceCache, lens: Sequence[int], *, together: bool) -> Tensor:
    """Logits behind each question and of a step after it."""
    forks, tokens = [first.fork() for _ in lens], questions(lens)
    if together:
        found = runner.prefill(forks, tokens)
    else:
        found = torch.cat([runner.prefill([fork], [ids]) for fork, ids in zip(forks, tokens, strict=True)])
    after = torch.cat([runner.decode([fork], [5]) for fork in forks])
    for fork in forks:
        fork.release()
    return torch.stack((found, after))


@pytest.mark.parametrize("policy", ["full", "keydiff + 2x", "snapkv + 2x + int4"])
def test_one_call_gives_the_bits_of_layers(
    policy: str, runner: Runner, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prefix(runner, policy)
    found = asked(runner, first, LENS, together=False)
    is_read = policy != "snapkv + 2x + int4"  # codes, and a scorer that wants to know queries, are read layer by layer
    assert calls.count("ExtendState") == (len(LENS) if is_read else 0)
    monkeypatch.setattr(PrefillCache, "all_layers", lambda _: None)
    assert torch.equal(asked(runner, first, LENS, together=False), found)
    first.release()


def test_forks_together_give_the_bits_of_each_alone(
    runner: Runner, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prefix(runner)
    expected = asked(runner, first, LENS, together=False)
    del calls[:]
    assert torch.equal(asked(runner, first, LENS, together=True), expected)
    assert calls.count("ExtendState") == 1
    monkeypatch.setattr(PrefillCache, "all_layers", lambda _: None)
    assert torch.equal(asked(runner, first, LENS, together=True), expected), "layer by layer, in one call of attention"
    monkeypatch.setattr(PrefillPass, "_attend_behind", lambda *_: None)
    assert torch.equal(asked(runner, first, LENS, together=True), expected), "and in a call for each"
    first.release()


def test_prompts_that_begin_give_the_bits_of_layers(
    runner: Runner, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun(*, together: bool) -> Tensor:
        tokens = questions([3, 17, 1, 130])
        sequences = [runner.new_sequence(Policy.parse("full")) for _ in tokens]
        if together:
            found = runner.prefill(sequences, tokens)
        else:
            found = torch.cat([runner.prefill([one], [ids]) for one, ids in zip(sequences, tokens, strict=True)])
        after = torch.cat([runner.decode([one], [5]) for one in sequences])
        for one in sequences:
            one.release()
        return torch.stack((found, after))

    expected = begun(together=False)
    assert calls.count("ExtendState") == 4
    assert torch.equal(begun(together=True), expected)
    assert calls.count("ExtendState") == 5
    monkeypatch.setattr(PrefillCache, "all_layers", lambda _: None)
    assert torch.equal(begun(together=True), expected) and torch.equal(begun(together=False), expected)


def test_forks_of_forks_share_several_segments(runner: Runner) -> None:
    first = prefix(runner)
    second = first.fork()
    runner.prefill([second], [prompt(40, seed=3)])
    expected = asked(runner, second, LENS, together=False)
    assert torch.equal(asked(runner, second, LENS, together=True), expected)
    first.release()
    second.release()


def test_strangers_run_as_they_do_alone(runner: Runner, calls: list[str]) -> None:
    """Forks of two prefixes, and a sequence that begins."""
    prefixes = [prefix(runner), prefix(runner, seed=1)]

    def sequences() -> list[SequenceCache]:
        return [*(first.fork() for first in prefixes for _ in range(2)), runner.new_sequence(Policy.parse("full"))]

    tokens = questions([4, 9, 2, 30, 12])
    alone = torch.cat([runner.prefill([one], [ids]) for one, ids in zip(sequences(), tokens, strict=True)])
    del calls[:]
    found = runner.prefill(sequences(), tokens)
    assert not calls
    torch.testing.assert_close(found, alone, rtol=0.02, atol=0.05)


def test_more_tokens_than_kernels_of_few_rows_take(runner: Runner, calls: list[str]) -> None:
    first = prefix(runner)
    both = runner.new_sequence(Policy.parse("full"))  # read at once
    expected = runner.prefill([both], [prompt(PREFIX, seed=0) + prompt(257, seed=9)])
    del calls[:]
    fork = first.fork()
    found = runner.prefill([fork], [prompt(257, seed=9)])
    assert not calls and torch.equal(found, expected)
    for sequence in (first, both, fork):
        sequence.release()


def test_a_broken_question_breaks_no_other(runner: Runner) -> None:
    first = prefix(runner)
    tokens = questions([5, 6, 7])
    unused = next(i for i in range(runner.spec.vocab_size) if all(i not in ids for ids in (*tokens, prompt(PREFIX))))
    forks = [first.fork() for _ in tokens]
    expected = runner.prefill(forks, tokens)
    weight = runner.hf.get_input_embeddings().weight
    with torch.no_grad():
        weight[unused] = torch.nan
    broken = [first.fork() for _ in tokens]
    found = runner.prefill(broken, [tokens[0], [*tokens[1][:2], unused, *tokens[1][3:]], tokens[2]])
    assert torch.equal(found[[0, 2]], expected[[0, 2]]) and found[1].isnan().all()
    found = runner.decode(broken, [5, 5, 5])
    assert torch.equal(found[[0, 2]], runner.decode([forks[0], forks[2], forks[2].fork()], [5, 5, 5])[:2])
    assert found[1].isnan().all()


@pytest.mark.parametrize("num_forks", [2, 7])
def test_steps_of_forks_run_in_one_call(
    num_forks: int, runner: Runner, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks of two prefixes, among others."""
    prefixes = [prefix(runner), prefix(runner, seed=1)]

    def steps() -> Tensor:
        stranger = runner.new_sequence(Policy.parse("full"))
        runner.prefill([stranger], [prompt(20)])
        sequences = [*(first.fork() for _ in range(num_forks) for first in prefixes), stranger]
        runner.prefill(sequences[:-1], questions(range(2, 2 * num_forks + 2)))
        found = torch.stack([runner.decode(sequences, [7 + i] * len(sequences)) for i in range(40)])  # blocks seal
        for sequence in sequences:
            sequence.release()
        return found

    found = steps()
    assert calls.count("AttentionState") == 40
    monkeypatch.setattr(DecodePass, "all_layers", lambda _: None)
    expected = steps()
    assert (found - expected).norm() < 0.02 * expected.norm()
