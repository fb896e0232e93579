"""Attention by AMX tiles is that of plain operations on bf16 numbers, whatever stands beside a row and wherever its
slots lie."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from kvfold.attend.lse_merge import attend_reference
from kvfold.attend.stored_parts import IS_BF16, Parts, part_of
from kvfold.core import has_amx_kernels

if not has_amx_kernels():
    pytest.skip("needs AMX and numba", allow_module_level=True)

from kvfold.attend.amx_attention import CALL

attend, attend_parts, can_attend = CALL.attend, CALL.attend_parts, CALL.can_attend
Inputs = tuple[Tensor, Tensor, Tensor]

# Weights are rounded to bf16, each by up to 2**-9 of it; twice the largest error measured over these shapes.
_ROUNDING = 9e-3


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def inputs(num_heads: int, group: int, num_queries: int, num_slots: int, head_dim: int) -> Inputs:
    """bf16 numbers: queries as a model has them, token after token, and keys behind which there is other memory."""
    generator = torch.Generator().manual_seed(0)
    q_TQD = torch.randn(num_queries, num_heads * group, head_dim, generator=generator).bfloat16().float()
    k_HSD, v_HSD = (
        torch.randn(num_heads, num_slots + 3, head_dim, generator=generator).bfloat16().float() for _ in range(2)
    )
    return q_TQD.transpose(0, 1).unflatten(0, (num_heads, group)), k_HSD[:, :num_slots], v_HSD[:, :num_slots]


def in_bf16(k_HSD: Tensor, v_HSD: Tensor) -> tuple[Parts, list[Tensor]]:
    """Slots as a part that is stored so, and what it points into."""
    stored, part_HP4 = [x.bfloat16() for x in (k_HSD, v_HSD)], part_of(k_HSD, v_HSD)
    for side, x_HSD in enumerate(stored):
        part_HP4[:, 0, side] = x_HSD.data_ptr() + 2 * x_HSD.stride(0) * np.arange(len(x_HSD))
    part_HP4[:, 0, IS_BF16] = 1
    return part_HP4, stored


def check(shape: tuple[int, int, int, int, int], causal: bool) -> None:
    q, k, v = inputs(*shape)
    assert can_attend(q, k, v, 0.3)
    (found, lse), (expected, expected_lse) = (run(q, k, v, 0.3, causal=causal) for run in (attend, attend_reference))
    torch.testing.assert_close(found, expected, rtol=0, atol=_ROUNDING)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-4)


COUNTS = 1, 15, 17, 31, 33, 127, 128, 129, 300
SHAPES = [(1, 1, 1, 1, 32), (3, 3, 10, 1018, 64), (2, 1, 15, 31, 96), (1, 4, 100, 333, 128), (1, 7, 2, 129, 128)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_are_those_of_plain_operations(
    shape: tuple[int, int, int, int, int], causal: bool, num_threads: int
) -> None:
    check(shape, causal)


@pytest.mark.parametrize("num_slots", COUNTS)
def test_any_number_of_queries_and_slots(num_slots: int) -> None:
    for num_queries in COUNTS:
        check((2, 1, num_queries, num_slots, 32), causal=False)
        if num_queries <= num_slots:
            check((1, 3, num_queries, num_slots, 64), causal=True)


def test_large_scores_and_slots_that_count_for_nothing() -> None:
    q, k, v = inputs(1, 1, 20, 300, 32)
    q = q * 32
    found, lse = attend(q, k, v, 1.0, causal=True)
    expected, expected_lse = attend_reference(q, k, v, 1.0, causal=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-4)


def test_other_numbers_are_rounded() -> None:
    q, k, v = (
        x + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in inputs(2, 3, 20, 90, 64)
    )
    found = attend(q, k, v, 0.1, causal=True)
    q, k, v = (x.bfloat16().float() for x in (q, k, v))
    expected = attend(q, k, v, 0.1, causal=True)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


@pytest.mark.parametrize("sharpness", [1.0, 16.0])
def test_a_row_gives_the_same_bits_beside_any_others_and_in_any_chunk(sharpness: float) -> None:
    q, k, v = inputs(2, 3, 200, 500, 64)
    q = q * sharpness
    whole, whole_lse = attend(q, k, v, 0.1, causal=True)
    cuts = [0, 1, 3, 40, 77, 82, 84, 85, 120, 150, 200]  # a block of slots ends between those of queries 83 and 84
    for begin, end in pairwise(cuts):
        seen = 300 + end
        chunk, lse = attend(q[:, :, begin:end], k[:, :seen], v[:, :seen], 0.1, causal=True)
        assert torch.equal(chunk, whole[:, :, begin:end]) and torch.equal(lse, whole_lse[:, :, begin:end])


def test_a_prompt_gives_the_same_bits_in_two_calls() -> None:
    q, k, v = inputs(1, 3, 300, 300, 64)
    whole, whole_lse = attend(q, k, v, 0.125, causal=True)
    for cut in (1, 127, 130, 160, 299):
        first, lse = attend(q[:, :, :cut], k[:, :cut], v[:, :cut], 0.125, causal=True)
        second, second_lse = attend(q[:, :, cut:], k, v, 0.125, causal=True)
        assert torch.equal(torch.cat((first, second), dim=2), whole)
        assert torch.equal(torch.cat((lse, second_lse), dim=2), whole_lse)


def test_slots_in_parts_of_either_type_give_the_bits_of_contiguous_ones(num_threads: int) -> None:
    q, k, v = inputs(2, 3, 10, 500, 64)
    expected, expected_lse = attend(q, k, v, 0.1, causal=True)
    pieces = [(k[:, a:b].clone(), v[:, a:b].clone()) for a, b in ((0, 37), (37, 300), (300, 301), (301, 500))]
    wide = [part_of(*piece) for piece in pieces]
    stored = [in_bf16(*piece) for piece in pieces]
    narrow = [part_HP4 for part_HP4, _ in stored]
    for parts in (wide, narrow, [*narrow[:2], *wide[2:]], [wide[0], *narrow[1:3], wide[3]]):
        found, lse = attend_parts(q, np.concatenate(parts, axis=1), 0.1, (64, 64), causal=True)
        assert torch.equal(found, expected) and torch.equal(lse, expected_lse)


def test_a_broken_query_shows_in_its_own_row() -> None:
    q, k, v = inputs(1, 2, 50, 140, 32)
    expected, _ = attend(q, k, v, 0.1, causal=True)
    q[0, 1, 20, 3] = torch.nan
    found, lse = attend(q, k, v, 0.1, causal=True)
    is_broken = torch.zeros(1, 2, 50, dtype=torch.bool)
    is_broken[0, 1, 20] = True
    assert torch.equal(lse.isnan(), is_broken) and found[is_broken].isnan().all()
    assert torch.equal(found[~is_broken], expected[~is_broken])


def test_a_broken_key_shows_in_the_rows_that_see_it() -> None:
    q, k, v = inputs(1, 2, 50, 140, 32)
    k[0, 120, 3] = torch.nan  # query 30
    found, lse = attend(q, k, v, 0.1, causal=True)
    assert found[:, :, 30:].isnan().all() and lse[:, :, 30:].isnan().all()
    assert not found[:, :, :30].isnan().any() and not lse[:, :, :30].isnan().any()


def test_a_row_that_sees_one_slot_gets_its_values() -> None:
    q, k, v = inputs(2, 3, 40, 40, 96)
    found, lse = attend(q, k, v, 0.1, causal=True)
    torch.testing.assert_close(found[:, :, 0], v[:, None, 0].expand(2, 3, 96), rtol=1e-6, atol=0)
    torch.testing.assert_close(lse[:, :, 0], 0.1 * (q[:, :, 0] * k[:, None, 0]).sum(-1), rtol=0, atol=1e-5)


def test_it_says_what_it_reads() -> None:
    q, k, v = inputs(2, 3, 4, 9, 64)
    assert can_attend(q, k, v, 0.1) and can_attend(q[..., :32], k[..., :32], v[..., :32], 0.1)
    assert not can_attend(q[..., :48], k[..., :48], v[..., :48], 0.1)
    assert not can_attend(q, k, v[..., :32], 0.1) and not can_attend(q, k, v, -0.1)
    assert not can_attend(q.bfloat16(), k, v, 0.1) and not can_attend(q.requires_grad_(), k, v, 0.1)


def test_heads_for_which_there_is_no_room_come_later(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(5, 2, 40, 300, 64)
    expected = attend(q, k, v, 0.3, causal=True)
    for room in (1, 2 * 4 * 384 * 64):  # one head at a time, two
        monkeypatch.setattr("kvfold.attend.amx_attention.ROOM_BYTES", room)
        found = attend(q, k, v, 0.3, causal=True)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


_AT_ONCE = """
from concurrent.futures import ThreadPoolExecutor
import torch
from tests.attend.test_amx_attention import attend, inputs
torch.set_num_threads(2)
q, k, v = inputs(2, 3, 200, 600, 64)
expected, _ = attend(q, k, v, 0.3, causal=True)
with ThreadPoolExecutor(8) as threads:
    found = threads.map(lambda _: attend(q, k, v, 0.3, causal=True)[0], range(64))
    assert all(torch.equal(one, expected) for one in found)
"""


def test_calls_at_once_have_rooms_of_their_own() -> None:
    """Of threads whose arrays come from one heap, as a server's do."""
    subprocess.run([sys.executable, "-c", _AT_ONCE], check=True, env={**os.environ, "MALLOC_ARENA_MAX": "1"})
