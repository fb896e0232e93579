"""Ends of sentences: noted in order, forgotten where other tokens come, numbered with long ones cut."""

from __future__ import annotations

import torch

from kvfold.pages.observer_state import Sentences

STOP = {9}


def test_positions_are_numbered_by_sentence() -> None:
    sentences = Sentences()
    sentences.note(0, [1, 9, 1, 1, 9, 9, 1], STOP)
    assert sentences.ends == [1, 4, 5]
    assert sentences.numbers(torch.arange(8), 64).tolist() == [0, 0, 1, 1, 1, 2, 3, 3]


def test_long_sentences_are_cut() -> None:
    """Tokens 0-4 end a sentence and 5-6 another; pieces of 2 make 3 of the first, and what follows has no end yet."""
    sentences = Sentences([4, 6])
    assert sentences.numbers(torch.arange(12), 2).tolist() == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5, 5, 6]
    assert sentences.numbers(torch.tensor([[6, 4], [11, 0]]), 2).tolist() == [[3, 2], [6, 0]]


def test_a_text_without_ends_is_cut_all_the_same() -> None:
    assert Sentences().numbers(torch.arange(7), 3).tolist() == [0, 0, 0, 1, 1, 1, 2]


def test_tokens_that_come_instead_of_others_count() -> None:
    sentences = Sentences([1, 4, 5])
    sentences.note(4, [1, 1, 9], STOP)
    assert sentences.ends == [1, 6]


def test_copies_go_their_own_ways() -> None:
    sentences = Sentences([1])
    branch = sentences.copy()
    branch.note(2, [9], STOP)
    assert (sentences.ends, branch.ends) == ([1], [1, 2])
    assert branch.num_bytes == 16
