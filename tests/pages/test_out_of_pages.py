"""A full arena is told before anything changes: lengths, codes, bytes; with memory back, the same step succeeds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.compression.seal import seal
from kvfold.errors import OutOfPages
from kvfold.pages.arena import Arena, Span
from kvfold.pages.layout import PageClass
from kvfold.pages.open_block import OpenBlock
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.prefill import PrefillPass
from tests.pages.test_codes import codes
from tests.pages.tiny import SMALL_BLOCK, decode, new_sequence, prefill, random_layers, tiny_spec

BALLAST: PageClass = OpenBlock.page_class(16, torch.float32, 32)  # one page fills a superblock
SPEC = tiny_spec(num_layers=3, sliding={1: 8})
LAYERS = random_layers(SPEC, 120)
SMALL = "protect(sinks=1, recent=2)"
POLICIES = ("full", "full + int4", f"random + ada + 20tok + {SMALL} + int8", f"knorm + global + 20tok + {SMALL}")
Step = Callable[[SequenceCache], Any]


def part(start: int, end: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(q[:, start:end], k[:, start:end], v[:, start:end]) for q, k, v in LAYERS]


def read_more(sequence: SequenceCache) -> None:
    prefill(sequence, part(sequence.committed_len, sequence.committed_len + 30))


STEPS: dict[str, Step] = {"seal": seal, "prefill": read_more, "fork": SequenceCache.fork}


@contextmanager
def only_free(arena: Arena, num_blocks: int) -> Any:
    """Lend all but num_blocks superblocks to nobody."""
    held: list[Span] = []
    while arena.free_bytes > num_blocks * arena.superblock_bytes:
        held += arena.allocate(BALLAST, 1)
    try:
        yield
    finally:
        for span in held:
            arena.free(span)


def snapshot(sequence: SequenceCache) -> dict[str, Any]:
    return {
        "lengths": (sequence.sealed_len, sequence.committed_len, sequence.logical_len, sequence.last_compressed_len),
        "codes": codes(sequence),
        "states": [{side: dict(state) for side, state in layer.state.items()} for layer in sequence.tail.layers],
        "open": [x[:, : sequence.open.fill].clone().tolist() for x in (*sequence.open.k, *sequence.open.v)],
        "bytes": (sequence.resident_bytes, sequence.arena.used_bytes, len(sequence.segments)),
        "extents": [layer.extents for layer in sequence.tail.layers],
    }


def made(policy: str, prompt_len: int, num_steps: int, forked: bool) -> tuple[SequenceCache, SequenceCache | None]:
    sequence = new_sequence(policy, SPEC, arena=Arena(80 * SMALL_BLOCK, superblock_bytes=SMALL_BLOCK), open_len=6)
    if prompt_len:
        prefill(sequence, part(0, prompt_len))
    branch = sequence.fork() if forked else None
    for _ in range(num_steps):
        decode(sequence, LAYERS, sequence.logical_len)
    return sequence, branch


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    prompt_len=st.integers(0, 50),
    num_steps=st.integers(0, 15),
    forked=st.booleans(),
    step=st.sampled_from(list(STEPS)),
    num_blocks=st.integers(0, 6),
)
def test_a_step_without_memory_changes_nothing(
    policy: str, prompt_len: int, num_steps: int, forked: bool, step: str, num_blocks: int
) -> None:
    sequence, _ = made(policy, prompt_len, num_steps, forked)
    twin, _ = made(policy, prompt_len, num_steps, forked)
    if step == "prefill":  # its first half, sealing what was committed, is a step of its own
        seal(sequence, compress=False)
        seal(twin, compress=False)
    before = snapshot(sequence)
    with only_free(sequence.arena, num_blocks):
        before["bytes"] = (sequence.resident_bytes, sequence.arena.used_bytes, len(sequence.segments))
        try:
            STEPS[step](sequence)
        except OutOfPages:
            assert same(snapshot(sequence), before)
        else:
            return
    STEPS[step](sequence)
    STEPS[step](twin)
    assert codes(sequence) == codes(twin)
    assert sequence.resident_bytes == twin.resident_bytes
    for found, expected in zip(decode(sequence, LAYERS, 119), decode(twin, LAYERS, 119), strict=True):
        assert torch.equal(found, expected)


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    return bool(found == expected)


def test_the_reported_peak_is_enough_and_one_block_less_is_not() -> None:
    def run(num_blocks: int) -> SequenceCache:
        arena = Arena(num_blocks * SMALL_BLOCK, superblock_bytes=SMALL_BLOCK)
        sequence = new_sequence("knorm + ada + 4x + protect(sinks=1, recent=4) + int4", SPEC, arena=arena)
        prefill(sequence, part(0, 60))
        for _ in range(40):
            decode(sequence, LAYERS, sequence.logical_len)
        return sequence

    num_blocks = run(200).arena.peak_bytes // SMALL_BLOCK
    assert run(num_blocks).arena.peak_bytes == num_blocks * SMALL_BLOCK
    with pytest.raises(OutOfPages):
        run(num_blocks - 1)


def test_an_open_block_that_does_not_fit_takes_nothing() -> None:
    arena = Arena(2 * SMALL_BLOCK, superblock_bytes=SMALL_BLOCK)
    with pytest.raises(OutOfPages, match=r"of 8\.2 kB has 8\.2 kB free, but .* are needed"):
        new_sequence("full", SPEC, arena=arena, open_len=64)
    assert arena.used_bytes == 0


def test_evicting_from_a_private_tail_needs_no_memory() -> None:
    """Survivors move inside their own pages: a full arena does not stop a bounded sequence."""
    sequence, _ = made(POLICIES[2], 50, 30, False)
    with only_free(sequence.arena, 2):
        for at in range(sequence.logical_len, 119):
            decode(sequence, LAYERS, at)
    assert sequence.logical_len == 119


def read_together(sequences: list[SequenceCache], followers: list[SequenceCache]) -> None:
    """One pass over 30 more tokens of each; followers read what the first one reads."""
    current = PrefillPass.begin(sequences, [30] * len(sequences), followers=followers)
    for i in range(SPEC.num_layers):
        for index, sequence in enumerate(sequences):
            current.attend(i, index, *part(sequence.sealed_len, sequence.sealed_len + 30)[i])
        current.finish_layer(i)
    current.finish()


@pytest.mark.parametrize("num_blocks", range(0, 24, 2))
@pytest.mark.parametrize("kind", ["batch", "branches", "followers"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_batch_is_read_as_a_whole_or_not_at_all(policy: str, kind: str, num_blocks: int) -> None:
    """Also where branches evict from what they share, and where sequences of one prompt have their own policies."""
    arena = Arena(200 * SMALL_BLOCK, superblock_bytes=SMALL_BLOCK)
    batch = [new_sequence(policy, SPEC, arena=arena, open_len=6) for _ in range(2)]
    if kind != "followers":
        for sequence in batch:
            prefill(sequence, part(0, 40))
    if kind == "branches":
        batch += [sequence.fork() for sequence in batch]
    followers = [batch.pop()] if kind == "followers" else []
    observed = [sequence.observed.copy() for sequence in (*batch, *followers)]
    before = [snapshot(sequence) for sequence in (*batch, *followers)]
    with only_free(arena, num_blocks):
        for known in before:
            known["bytes"] = (known["bytes"][0], arena.used_bytes, known["bytes"][2])
        try:
            read_together(batch, followers)
        except OutOfPages:
            assert all(same(snapshot(s), known) for s, known in zip((*batch, *followers), before, strict=True))
    for sequence, state in zip((*batch, *followers), observed, strict=True):
        sequence.observed = state  # what scorers saw is put back by those who call the model
    if batch[0].sealed_len == before[0]["lengths"][0]:
        read_together(batch, followers)
    assert len({sequence.sealed_len for sequence in (*batch, *followers)}) == 1
    for sequence in (*batch, *followers):
        sequence.release()
    assert arena.used_bytes == 0
