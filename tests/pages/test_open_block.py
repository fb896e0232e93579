"""The open block: what is committed seals, what is drafted rolls back, what was sealed away moves up."""

from __future__ import annotations

import pytest

from kvfold.compression.seal import seal
from kvfold.errors import InputError
from kvfold.pages.sequence import SequenceCache
from tests.pages.tiny import fill, new_sequence, readable, step, tokens_of


def all_tokens(sequence: SequenceCache) -> list[list[int]]:
    return [tokens for layer in range(2) for tokens in tokens_of(sequence, layer)]


def test_drafts_roll_back_to_the_commit_line() -> None:
    sequence = new_sequence(open_len=6)
    step(sequence)
    step(sequence, 3, commit=False)
    assert sequence.committed_len == 1 and sequence.logical_len == 4
    sequence.open.commit(1)
    sequence.open.rollback()
    assert all_tokens(sequence) == [[0, 1]] * 4
    step(sequence, 2)
    assert all_tokens(sequence) == [[0, 1, 2, 3]] * 4


def test_only_committed_slots_seal_and_drafts_move_up() -> None:
    sequence = new_sequence(open_len=6)
    step(sequence, 2)
    step(sequence, 3, commit=False)
    seal(sequence)
    assert sequence.sealed_len == sequence.committed_len == 2 and sequence.open.fill == 3
    assert sequence.stored_lens(0) == [2, 2]
    assert all_tokens(sequence) == [[0, 1, 2, 3, 4]] * 4


def test_more_than_there_is_cannot_be_committed() -> None:
    sequence = new_sequence(open_len=6)
    step(sequence, 2, commit=False)
    sequence.open.commit(5)
    assert sequence.committed_len == 2


def test_a_block_full_of_drafts_is_refused() -> None:
    sequence = new_sequence(open_len=3)
    step(sequence, 3, commit=False)
    k = readable(sequence.spec, 0, 3, 1)
    with pytest.raises(InputError, match="the open block holds 3 slots; 4 were to be filled"):
        sequence.open.write(0, k, k)


def test_reading_seals_what_was_committed() -> None:
    sequence = new_sequence(open_len=6)
    fill(sequence, 5)
    step(sequence, 2)
    fill(sequence, 4)
    assert all_tokens(sequence) == [list(range(11))] * 4
    assert sequence.sealed_len == 11 and sequence.open.fill == 0


def test_a_released_sequence_holds_nothing() -> None:
    sequence = new_sequence("h2o + 30tok + protect(sinks=1, recent=2)", open_len=6)
    fill(sequence, 20)
    step(sequence, 2)
    sequence.release()
    assert sequence.arena.used_bytes == sequence.resident_bytes == sequence.logical_len == 0
    sequence.release()  # again: nothing is returned twice
    assert sequence.arena.free_bytes == sequence.arena.capacity_bytes
