"""Blocks appended on arrays go where slots belong: behind each head's own, across extents, in all sequences at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.pages.append import append_blocks, lacks_room, num_ahead, reserve_ahead, reserve_pages
from kvfold.pages.arena import Arena
from kvfold.pages.places import COLUMNS, SegmentTable
from kvfold.pages.segment import segment_table
from kvfold.pages.sequence import SequenceCache
from tests.pages.tiny import SMALL_BLOCK, fill, new_sequence, stored_tokens, tiny_spec

SPEC = tiny_spec(num_layers=3, num_heads=2)
POSITION_COLUMN = len(COLUMNS)  # positions come after the columns that kernels read


def waiting(sequence: SequenceCache, num_tokens: int) -> None:
    """Committed tokens in the open block; their numbers are of no interest here."""
    sequence.open.advance(num_tokens)
    sequence.open.commit(num_tokens)


def append(sequences: Sequence[SequenceCache]) -> None:
    """Seal as the kernel does, but positions only."""
    starts = [sequence.sealed_len for sequence in sequences]
    tables = [reserve_pages(sequence) for sequence in sequences]
    words = sequences[0].arena.memory.view(torch.int32)
    places, *stretches = append_blocks(sequences, tables)
    address_E = np.concatenate([item.address_EF[:, POSITION_COLUMN] for item in places.each])
    for extent, begin, count, filled in zip(*(column.tolist() for column in stretches), strict=True):
        at, first = int(address_E[extent]) // 4 + filled, starts[places.owner_E[extent]] + begin
        words[at : at + count] = torch.arange(first, first + count, dtype=torch.int32)
    for sequence in sequences:
        sequence.open.drop_committed()


def same_table(found: SegmentTable, expected: SegmentTable) -> None:
    for name in ("layer_E", "head_E", "row_E", "capacity_E", "address_EF", "stride_LF"):
        np.testing.assert_array_equal(getattr(found.places, name), getattr(expected.places, name))
    np.testing.assert_array_equal(found.length_E, expected.length_E)
    assert found.least_room == expected.least_room


@settings(max_examples=30, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    rounds=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    page_size=st.sampled_from((2, 4, 16)),
    reserved=st.sampled_from((0, 40)),
    is_ahead=st.booleans(),
)
def test_every_head_gets_the_next_positions(
    prompts: list[int], rounds: list[int], page_size: int, reserved: int, is_ahead: bool
) -> None:
    arena = Arena(4 << 20, superblock_bytes=SMALL_BLOCK)
    sequences = [new_sequence("full", SPEC, arena=arena, page_size=page_size, open_len=8) for _ in prompts]
    for sequence, length in zip(sequences, prompts, strict=True):
        fill(sequence, length)
        sequence.tail.reserve([[reserved, reserved]] * 3)  # behind a page that may have room, too
    for num_tokens in (num_tokens for num_tokens in rounds for _ in range(3)):
        for i, sequence in enumerate(sequences):
            waiting(sequence, min(num_tokens + i, 8))
        for sequence in filter(lacks_room, sequences if is_ahead else ()):
            reserve_ahead(sequence)
            assert not lacks_room(sequence)
        append(sequences)
    for sequence in sequences:
        everything = list(range(sequence.sealed_len))
        assert all(stored_tokens(sequence, i, head) == everything for i in range(3) for head in range(2))
        known = segment_table(sequence.tail)
        sequence.tail.changes.rise()  # forgets it
        same_table(known, segment_table(sequence.tail))
        sequence.release()
    assert arena.used_bytes == 0


def test_heads_of_unequal_length_keep_their_own_ends() -> None:
    sequence = new_sequence("random + ada + 24tok + protect(none)", SPEC, open_len=4)
    fill(sequence, 60)
    before = [sequence.stored_lens(i) for i in range(3)]
    assert len({length for lens in before for length in lens}) > 1
    waiting(sequence, 4)
    append([sequence])
    assert [sequence.stored_lens(i) for i in range(3)] == [[n + 4 for n in lens] for lens in before]
    assert all(stored_tokens(sequence, i, head)[-4:] == [60, 61, 62, 63] for i in range(3) for head in range(2))
    sequence.release()


@pytest.mark.parametrize(("num_tokens", "moves"), [(4, False), (8, True)])
def test_places_are_the_same_object_until_pages_are_added(num_tokens: int, moves: bool) -> None:
    sequence = new_sequence("full", SPEC, page_size=16, open_len=8)
    fill(sequence, 10)  # one page: room for 6 more
    before = segment_table(sequence.tail)
    waiting(sequence, num_tokens)
    append([sequence])
    after = segment_table(sequence.tail)
    assert after is not before
    assert (after.places is not before.places) == moves
    sequence.release()


@pytest.mark.parametrize("policy", ["full", "random + ada + 24tok + protect(none)"])
def test_pages_found_ahead_are_those_that_the_seal_would_find(policy: str) -> None:
    early, late = (new_sequence(policy, SPEC, page_size=4, open_len=8) for _ in range(2))
    for sequence in (early, late):
        fill(sequence, 60)
        waiting(sequence, 8)
    assert lacks_room(early)
    reserve_ahead(early)
    used_bytes = early.arena.used_bytes
    for sequence in (early, late):
        append([sequence])
    assert early.arena.used_bytes == late.arena.used_bytes == used_bytes
    same_table(segment_table(early.tail), segment_table(late.tail))
    for sequence in (early, late):
        sequence.release()


@pytest.mark.parametrize("capacity", [4 << 20, 96 << 10], ids=["roomy", "scarce"])
def test_room_for_several_blocks_is_found_while_half_of_the_arena_is_free(capacity: int) -> None:
    sequence = new_sequence("full", SPEC, arena=Arena(capacity, superblock_bytes=SMALL_BLOCK), page_size=4, open_len=8)
    fill(sequence, 60)
    is_roomy = 2 * sequence.arena.free_bytes > capacity
    reserve_ahead(sequence, 5)
    assert (segment_table(sequence.tail).least_room >= 6 * 8) == is_roomy
    assert not lacks_room(sequence) and is_roomy == (capacity > 1 << 20)
    sequence.release()


def test_a_tail_that_has_pages_but_no_slots_is_empty() -> None:
    sequence = new_sequence("full", SPEC, page_size=4, open_len=8)
    fill(sequence, 20)
    branch = sequence.fork()
    reserve_ahead(branch)
    assert branch.tail.is_empty
    again = branch.fork()
    assert len(again.segments) == 1
    for each in (sequence, branch, again):
        each.release()
    assert sequence.arena.used_bytes == 0


@given(st.lists(st.integers(1, 32), min_size=1, max_size=80))
def test_all_find_pages_in_time_and_no_step_takes_more_than_the_first(rooms: list[int]) -> None:
    first = num_ahead(rooms)
    while rooms:
        count = num_ahead(rooms)
        assert count <= first
        rooms = [room - 1 for room in sorted(rooms)[count:]]
        assert all(rooms)
