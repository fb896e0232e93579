"""Sequences that share a prefix read it together: what they say is what each says alone."""

from __future__ import annotations

import pytest
import torch

from kvfold.core import HAS_AVX512_KERNELS
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.passes import cpu_cascade
from kvfold.policy.policy import Policy
from tests.tiny import prompt

pytestmark = pytest.mark.skipif(not HAS_AVX512_KERNELS, reason="needs AVX-512 and numba")


def forked(runner: Runner, policy: str, num_forks: int, length: int) -> list[SequenceCache]:
    """Sequences behind one prompt, with questions of different lengths."""
    first = runner.new_sequence(Policy.parse(policy))
    runner.prefill([first], [prompt(length)])
    found = [first.fork() for _ in range(num_forks)]
    for index, sequence in enumerate(found):
        runner.prefill([sequence], [prompt(3 + 5 * index, seed=index)])
    first.release()
    return found


def steps(runner: Runner, sequences: list[SequenceCache], num_steps: int) -> torch.Tensor:
    found, tokens = [], [5 + index for index in range(len(sequences))]
    for _ in range(num_steps):
        found.append(runner.decode(sequences, tokens))
        tokens = found[-1].argmax(-1).tolist()
    for sequence in sequences:
        sequence.release()
    return torch.stack(found)


@pytest.mark.parametrize("policy", ["full", "keydiff + 2x + protect(none)", "int4"])
def test_steps_over_a_shared_prefix_are_those_of_each(
    policy: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(model.hf, model.spec, model.arena)
    other = runner.new_sequence(Policy.parse(policy))
    runner.prefill([other], [prompt(50)])
    sequences = [*forked(runner, policy, 3, 150), other]
    groups = cpu_cascade.groups_of(sequences)
    assert [group.index_b.tolist() for group in groups] == ([[0, 1, 2]] if policy == "full" else [])
    found = steps(runner, sequences, 40)  # the open blocks seal
    monkeypatch.setattr(cpu_cascade, "HAS_AVX512_KERNELS", False)
    again = runner.new_sequence(Policy.parse(policy))
    runner.prefill([again], [prompt(50)])
    expected = steps(runner, [*forked(runner, policy, 3, 150), again], 40)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_sequences_that_have_segments_of_their_own_share_the_first(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As hits whose question has been stored, too."""
    runner = Runner(model.hf, model.spec, model.arena)

    def stored() -> list[SequenceCache]:
        found = forked(runner, "full", 3, 150)
        for sequence in found[:2]:
            sequence.fork().release()  # its tail has become a segment, and stays one while a fork holds it
        forks.extend(sequence.fork() for sequence in found[:2])
        return found

    forks: list[SequenceCache] = []
    sequences = stored()
    assert [len(sequence.segments) for sequence in sequences] == [2, 2, 1]
    (group,) = cpu_cascade.groups_of(sequences)
    assert group.index_b.tolist() == [0, 1, 2] and group.num_shared == 1
    found = steps(runner, sequences, 40)
    monkeypatch.setattr(cpu_cascade, "HAS_AVX512_KERNELS", False)
    torch.testing.assert_close(found, steps(runner, stored(), 40), rtol=1e-4, atol=1e-4)
    for fork in forks:
        fork.release()


def test_what_is_shared_by_one_sequence_alone_is_read_with_the_rest(model: Model) -> None:
    runner = Runner(model.hf, model.spec, model.arena)
    sequences = forked(runner, "full", 2, 80)
    assert len(cpu_cascade.groups_of(sequences)) == 1
    sequences[0].release()
    assert not cpu_cascade.groups_of(sequences[1:])
    assert steps(runner, sequences[1:], 3).isfinite().all()
