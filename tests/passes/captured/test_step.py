"""Steps over device tables agree with the plain decode pass: for every codec, ragged lanes, seals, forks, drafts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvfold.engine.cuda_graphs import CudaGraphs
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.step import layout_of
from kvfold.passes.decode import DecodePass
from tests.attend.kernels.common import DEVICE
from tests.engine.runs import make_runner, make_sequence
from tests.tiny import prompt, ready

POLICIES = (
    "full",
    "bf16",
    "fp8",
    "int8(group_size=8)",
    "int4",
    "int2",
    "kivi4",
    "kivi2",
    "int4(layers=1:)",
    "snapkv(window=4) + ada + 4x + int4 + protect(sinks=2, recent=4)",
    "keydiff + global + 8x + int4 + protect(recent=0)",
    "keydiff + 3x + protect(none)",
    "kvzip + global + 4x + fit(tokens=30) + protect(sinks=2, recent=4)",
    "prefill(keydiff + ada + 64tok + fit(prompt, tokens=30)) + decode(h2o + 64tok) + int4",
    "streaming + 64tok",
    "streaming + 64tok + slot",
    "streaming(sinks=3) + 64tok + slot + int4 + protect(sinks=3, recent=4)",
    "full + slot",
    "keydiff + 10x + slot + protect(none)",
    "keydiff + 10x + slot + protect(none) + int8",
    "h2o + 64tok + protect(sinks=2, recent=4)",
    "h2o + ada + 64tok + int4 + protect(sinks=2, recent=4)",
    "h2o + 4x + protect(none)",
    "tova + 64tok",
    "snapkv(window=4) + 64tok + int8 + protect(sinks=2, recent=4)",
    "prefill(streaming + 64tok) + decode(h2o + 64tok + protect(recent=48)) + slot",
)
LENGTHS = (90, 200, 131)
NEAR = 2e-4 if DEVICE == "cpu" else 2e-3  # on an H200 steps over two-bit codes differ by 3e-4


@pytest.fixture(scope="module")
def model() -> Model:
    return ready("llama", device=DEVICE)


def make_both(model: Model) -> tuple[Runner, CudaGraphs]:
    """The plain way, and that of the kernels, which on a GPU are launched one by one."""
    runner, graphs = make_runner(model), CudaGraphs()
    runner.graphs, graphs.captures = None, False
    return runner, graphs


def make(runner: Runner, policy: str, count: int) -> list[SequenceCache]:
    return [make_sequence(runner, policy, page_size=16, open_len=8) for _ in range(count)]


@torch.inference_mode()
def step(
    graphs: CudaGraphs, model: Model, sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]
) -> Tensor:
    """A decode step the way of the kernels, committed."""
    current = DecodePass.begin(sequences, [len(ids) for ids in tokens])
    logits = graphs.decode(model.hf, sequences, tokens)
    assert logits is not None
    current.finish()
    for sequence, ids in zip(sequences, tokens, strict=True):
        sequence.open.commit(len(ids))
    return logits


def same(found: Tensor | None, expected: Tensor | None) -> None:
    torch.testing.assert_close(found, expected, atol=NEAR, rtol=NEAR / 2)


@torch.inference_mode()
def same_block(mine: SequenceCache, theirs: SequenceCache) -> None:
    """The same numbers to seal, after a look that they hardly differ: a code may flip on the last bit of a float."""
    for a, b in zip((*mine.open.k, *mine.open.v), (*theirs.open.k, *theirs.open.v), strict=True):
        same(a[:, : mine.open.fill], b[:, : theirs.open.fill])
    mine.open.copy_from(theirs.open)


def same_observations(mine: SequenceCache, theirs: SequenceCache) -> None:
    fill = theirs.open.fill
    for a, b in zip(mine.observed.layers, theirs.observed.layers, strict=True):
        open_mass = tuple(None if side.open_mass_HR is None else side.open_mass_HR[:, :fill] for side in (a, b))
        for found, want in ((a.mass_HS, b.mass_HS), open_mass, (a.last_q_QWD, b.last_q_QWD)):
            same(found, want)


@pytest.mark.parametrize("policy", POLICIES)
def test_steps_agree_with_the_plain_pass_across_seals(model: Model, policy: str) -> None:
    runner, graphs = make_both(model)
    plain, fast = make(runner, policy, 3), make(runner, policy, 3)
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    for sequences in (plain, fast):
        runner.prefill(sequences, prompts)
    for token in range(18):  # blocks of 8 seal twice
        ids = [token, token + 1, token + 2]
        expected = runner.decode(plain, ids)
        same(step(graphs, model, fast, [[i] for i in ids]), expected)
        for mine, theirs in zip(fast, plain, strict=True):
            same_block(mine, theirs)
            same_observations(mine, theirs)
    for sequence in (*plain, *fast):
        sequence.release()


def test_lanes_are_kept_left_and_taken_again(model: Model) -> None:
    runner, graphs = make_both(model)
    plain, fast = make(runner, "int4", 4), make(runner, "int4", 4)
    prompts = [prompt(40 + 30 * i, seed=i) for i in range(4)]
    for sequences in (plain, fast):
        runner.prefill(sequences, prompts)
    for round_, batch in enumerate(([0, 1, 2], [2, 0], [3, 2, 1], [1], [0, 1, 2, 3])):
        ids = [[5 * round_ + i] for i in batch]
        expected = runner.decode([plain[i] for i in batch], [i for (i,) in ids])
        found = step(graphs, model, [fast[i] for i in batch], ids)
        same(found, expected)
    for sequence in (*plain, *fast):
        sequence.release()


def test_ragged_drafts_are_padded_and_the_padding_never_stays(model: Model) -> None:
    runner, graphs = make_both(model)
    plain, fast = make(runner, "int4", 2), make(runner, "int4", 2)
    prompts = [prompt(50, seed=1), prompt(77, seed=2)]
    for sequences in (plain, fast):
        runner.prefill(sequences, prompts)
    drafts = [[1, 2, 3, 4, 5], [6, 7]]  # with padding to 8 tokens, all of a block
    for tokens in (drafts, [[8, 9], [10, 11]]):
        one_by_one = [runner.decode([s], [i]) for s, ids in zip(plain, tokens, strict=True) for i in ids]
        found = step(graphs, model, fast, tokens)
        same(found, torch.cat(one_by_one))
    for sequence in (*plain, *fast):
        sequence.release()


def test_a_fork_reads_shared_pages_and_its_own(model: Model) -> None:
    runner, graphs = make_both(model)
    (first,) = make(runner, "int4", 1)
    runner.prefill([first], [prompt(100, seed=3)])
    second, third = first.fork(), first.fork()
    for token in range(12):
        expected = runner.decode([second], [token])
        same(step(graphs, model, [third], [[token]]), expected)
    for sequence in (first, second, third):
        sequence.release()


def test_a_sequence_that_outgrows_its_lane_gets_a_larger_one(model: Model) -> None:
    runner, graphs = make_both(model)
    plain, fast = make(runner, "full", 1), make(runner, "full", 1)
    runner.prefill(plain, [prompt(20)])
    runner.prefill(fast, [prompt(20)])
    step(graphs, model, fast, [[1]])
    runner.decode(plain, [1])
    longer = prompt(6000, seed=4)  # more tasks of 128 slots than the lane had room for
    runner.prefill(plain, [longer])
    runner.prefill(fast, [longer])
    expected = runner.decode(plain, [2])
    torch.testing.assert_close(step(graphs, model, fast, [[2]]), expected, atol=5e-4, rtol=1e-3)
    for sequence in (*plain, *fast):
        sequence.release()


def test_mean_keys_that_are_learnt_at_the_first_seal_reach_the_lane(model: Model) -> None:
    runner, graphs = make_both(model)
    plain, fast = make(runner, "int4", 1), make(runner, "int4", 1)
    for token in range(20):  # nothing is stored when the lane is taken
        expected = runner.decode(plain, [token])
        same(step(graphs, model, fast, [[token]]), expected)
        same_block(fast[0], plain[0])
    for sequence in (*plain, *fast):
        sequence.release()


@pytest.mark.parametrize("policy", ["expected + 64tok", "snapkv(window=4) + 64tok", "quest"])
def test_what_kernels_do_not_serve_goes_the_plain_way(model: Model, policy: str) -> None:
    (sequence,) = make(make_runner(model), policy, 1)
    assert layout_of(sequence) is None
    sequence.release()


def test_keys_that_appear_moved_by_many_distances_go_the_plain_way(model: Model) -> None:
    """Also where they become so only later."""
    runner, graphs = make_both(model)
    plain, fast = (make(runner, "keydiff + 3x + slot + protect(none)", 1) for _ in range(2))
    for sequences in (plain, fast):
        runner.prefill(sequences, [prompt(40)])
    same(step(graphs, model, fast, [[1]]), runner.decode(plain, [1]))
    runner.prefill(fast, [prompt(400, seed=4)])
    assert layout_of(fast[0]) is None
    for sequence in (*plain, *fast):
        sequence.release()


def test_lanes_make_room_for_more_distances(model: Model) -> None:
    runner, graphs = make_both(model)
    plain, fast = (make(runner, "keydiff + 6x + slot + protect(none)", 1) for _ in range(2))
    for seed, length in enumerate((50, 60, 60)):
        for sequences in (plain, fast):
            runner.prefill(sequences, [prompt(length, seed=seed)])
        found = step(graphs, model, fast, [[seed]])
        same(found, runner.decode(plain, [seed]))
    for sequence in (*plain, *fast):
        sequence.release()


def test_pages_that_break_alignment_go_the_plain_way(model: Model) -> None:
    runner = make_runner(model)
    sequence = make_sequence(runner, "int4", page_size=4)
    assert layout_of(sequence) is None
    sequence.release()
