"""Sliding-window layers against a masked map: prompts in any cuts, several prompts, decode steps, branches."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from tests.attend.reference import full_attention, part
from tests.pages.tiny import decode, new_sequence, prefill, random_layers, tiny_spec


def split(total: int, cuts: list[int]) -> list[int]:
    borders = sorted({0, total, *(cut for cut in cuts if cut < total)})
    return [end - start for start, end in pairwise(borders)]


@settings(max_examples=30, deadline=None)
@given(
    window=st.integers(1, 25),
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 39), max_size=3),
    num_steps=st.integers(0, 15),
    forks=st.booleans(),
    open_len=st.integers(1, 9),
)
def test_windows_equal_a_masked_map(
    window: int, prompts: list[int], cuts: list[int], num_steps: int, forks: bool, open_len: int
) -> None:
    spec = tiny_spec(num_layers=2, num_heads=2, group=3, sliding={1: window})
    total = sum(prompts) + num_steps
    layers = random_layers(spec, total)
    sequence = new_sequence("full", spec, open_len=open_len)
    outs: list[list[Tensor]] = [[], []]
    at = 0
    for length in prompts:
        for out, found in zip(outs, prefill(sequence, part(layers, at, at + length), split(length, cuts)), strict=True):
            out.append(found)
        at += length
        sequence = branch_of(sequence) if forks else sequence
    for step in range(at, total):
        for out, found in zip(outs, decode(sequence, layers, step), strict=True):
            out.append(found)
    for i, qkv in enumerate(layers):
        torch.testing.assert_close(torch.cat(outs[i], dim=1), full_attention(spec, i, *qkv), atol=2e-5, rtol=1e-4)
    assert sequence.tail.layers[1].lens[0] < window + open_len


def branch_of(sequence: SequenceCache) -> SequenceCache:
    branch = sequence.fork()
    sequence.release()
    return branch


@pytest.mark.parametrize("window", [2, 3, 20])
def test_drafts_see_their_window(window: int) -> None:
    spec = tiny_spec(num_layers=1, sliding={0: window})
    layers = random_layers(spec, 30)
    sequence = new_sequence("full", spec, open_len=9)
    prefill(sequence, part(layers, 0, 20))
    decode(sequence, layers, 20)
    found = DecodePass.begin([sequence], 6).attend(0, 0, *part(layers, 21, 27)[0])
    expected = full_attention(spec, 0, *part(layers, 0, 27)[0])[:, 21:]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_windows_stay_small_whatever_the_policy_does() -> None:
    """Memory of a sliding layer is its window, a page and the room for one more block."""
    spec = tiny_spec(num_layers=2, sliding={1: 8})
    layers = random_layers(spec, 200)
    sequence = new_sequence("full", spec)
    prefill(sequence, part(layers, 0, 100))
    for at in range(100, 200):
        decode(sequence, layers, at)
        pages = sequence.tail.layers[1]
        assert pages.lens[0] <= 8 + 4
        assert sum(extent.capacity for extent in pages.extents[0]) <= 8 + 4 + 4 + 4
