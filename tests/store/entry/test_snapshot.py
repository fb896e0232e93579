"""Sequences as blocks and back; tensors that do not fit are refused, each of them, before they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.store.entry.encodings.base import check_specs
from kvfold.store.entry.format import Fields, InvalidEntry
from kvfold.store.entry.snapshot import chunk_specs, read_slots, restore_snapshot, share_prefix, snapshot_blocks
from tests.engine.runs import Shared
from tests.store.common import CHUNK, PAGES, make_runner, positions
from tests.tiny import prompt

LENGTH = 100
WATCHING = ["h2o + 60tok", "decode(expected + 60tok)", "decode(tova + 60tok)"]
POLICIES = ["full", "knorm + 2x + int8", "full + kivi4", *WATCHING]
SPOILS: dict[str, Callable[[Tensor], Tensor]] = {
    "shape": lambda x: x[..., :-1],
    "dtype": lambda x: x.to(torch.float64),
    "empty": lambda x: x[:0],
    "flat": lambda x: x.flatten()[: max(1, x.numel() - 1)],
}


def filled(model: Model, policy: str, num_decoded: int = 3) -> SequenceCache:
    runner = make_runner(model)
    sequence = runner.new_sequence(Policy.parse(policy), PAGES)
    runner.prefill([sequence], [prompt(LENGTH)])
    for token in prompt(num_decoded, seed=4):
        runner.decode([sequence], [token])
    return sequence


def empty(sequence: SequenceCache) -> SequenceCache:
    return SequenceCache(sequence.arena, sequence.spec, sequence.policy, sequence.config)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_snapshot_comes_back(model: Model, policy: str) -> None:
    sequence = filled(model, policy)
    again = empty(sequence)
    restore_snapshot(again, LENGTH + 3, snapshot_blocks(sequence).items())
    assert positions(again) == positions(sequence) and again.open.fill == 3
    runner, token = make_runner(model), 5
    found = [runner.decode([one], [token]) for one in (sequence, again)]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
    sequence.release()
    again.release()


@pytest.mark.parametrize("policy", POLICIES)
def test_tensors_that_do_not_fit_are_refused(model: Model, policy: str) -> None:
    sequence = filled(model, policy)
    blocks = snapshot_blocks(sequence)
    for changed in (each for spoil in SPOILS.values() for each in _each_spoiled(blocks, spoil)):
        again = empty(sequence)
        with pytest.raises(InvalidEntry, match="corrupt"):
            restore_snapshot(again, LENGTH + 3, changed.items())
        again.release()
    sequence.release()


def _each_spoiled(blocks: dict[str, Fields], spoil: Callable[[Tensor], Tensor]) -> Iterator[dict[str, Fields]]:
    """All blocks, with one tensor of the last one or of the whole sequence spoiled or missing."""
    for block in ("2", "sequence"):
        for name, tensor in blocks[block].items():
            spoiled = spoil(tensor)
            if spoiled.shape != tensor.shape or spoiled.dtype != tensor.dtype:
                yield {**blocks, block: {**blocks[block], name: spoiled}}


def test_another_length_than_the_keys_is_refused(model: Model) -> None:
    sequence = filled(model, "knorm + 2x")
    again = empty(sequence)
    with pytest.raises(InvalidEntry, match="holds 103 tokens, not 102"):
        restore_snapshot(again, LENGTH + 2, snapshot_blocks(sequence).items())
    again.release()
    sequence.release()


@pytest.mark.parametrize("spoil", SPOILS)
def test_chunks_that_do_not_fit_are_refused(model: Model, spoil: str) -> None:
    sequence = filled(model, "full", 0)
    pages, fields = sequence.tail.layers[0], read_slots(sequence, 0, 0, CHUNK)
    specs = chunk_specs(pages, CHUNK)
    check_specs(fields, specs)
    for name, tensor in fields.items():
        with pytest.raises(InvalidEntry, match="its tensors are"):
            check_specs({**fields, name: SPOILS[spoil](tensor)}, specs)
        with pytest.raises(InvalidEntry, match="its tensors are"):
            check_specs({other: x for other, x in fields.items() if other != name}, specs)
    sequence.release()


def test_slots_over_several_segments_are_one_range(shared: Shared) -> None:
    model = shared("llama")
    runner, sequence = make_runner(model), filled(model, "full", 0)
    whole = read_slots(sequence, 1, 10, 90)
    other = runner.new_sequence(Policy.parse("full"), PAGES)
    branches = []
    for begin in range(0, LENGTH, 20):
        runner.prefill([other], [prompt(LENGTH)[begin : begin + 20]])
        branches.append(other.fork())
    assert len(other.segments) == 5
    found = read_slots(other, 1, 10, 90)
    for name, x_HNW in whole.items():
        assert x_HNW.shape[1] == 80
        torch.testing.assert_close(found[name], x_HNW, atol=1e-4, rtol=1e-4)
    copy = share_prefix(other, 50)
    assert copy.positions(2, 0).tolist() == list(range(50)) and copy.committed_len == 50
    for one in (sequence, other, copy, *branches):
        one.release()


@pytest.mark.parametrize(("num_tokens", "num_shared"), [(96, 96), (70, 70), (48, 48), (40, 0), (100, 96)])
def test_a_prefix_shares_pages_and_outlives_what_it_was_taken_from(
    shared: Shared, num_tokens: int, num_shared: int
) -> None:
    """The two go on apart, and a copy on the host of the shorter one has nothing of what is behind it."""
    model, tokens = shared("llama"), prompt(LENGTH + 40)
    runner = make_runner(model)
    sequence = runner.new_sequence(Policy.parse("full"), PAGES)
    runner.prefill([sequence], [tokens[:96]])
    branch = sequence.fork()
    runner.prefill([sequence], [tokens[96:LENGTH]])
    found, whole = share_prefix(sequence, num_tokens), sequence.segments[0]
    assert sum(segment.layers[0].lens[0] for segment in found.segments) == num_shared
    more = found.fork()
    for one in (branch, sequence):
        runner.prefill([one], [prompt(30, seed=9)])
        one.release()
    assert (whole.refs > 0) == (num_shared > 0)
    logits_BV = runner.prefill([found], [tokens[num_tokens : num_tokens + 20]])
    expected = runner.new_sequence(Policy.parse("full"), PAGES)
    runner.prefill([expected], [tokens[:num_tokens]])
    torch.testing.assert_close(
        logits_BV, runner.prefill([expected], [tokens[num_tokens : num_tokens + 20]]), atol=1e-4, rtol=1e-4
    )
    restored = runner.new_sequence(Policy.parse("full"), PAGES)
    restore_snapshot(restored, found.committed_len, snapshot_blocks(found).items())
    step_BV = runner.decode([found], [5])
    torch.testing.assert_close(runner.decode([restored], [5]), step_BV, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(runner.decode([expected], [5]), step_BV, atol=1e-4, rtol=1e-4)
    for one in (found, more, expected, restored):
        one.release()
    assert whole.refs == 0


def test_where_a_reader_ranks_pages_a_part_of_them_is_copied(shared: Shared) -> None:
    model = shared("llama")
    runner, policy = make_runner(model), Policy.parse("full + quest(16)")
    sequence = runner.new_sequence(policy, PAGES)
    runner.prefill([sequence], [prompt(LENGTH)])
    branch = sequence.fork()
    found = share_prefix(sequence, LENGTH - 3)
    assert found.segments == [] and found.committed_len == LENGTH - 3
    for one in (sequence, branch, found):
        one.release()
