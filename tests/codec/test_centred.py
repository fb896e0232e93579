"""Codecs that store keys minus their mean and rotated: the mean key, the way back, channels large for every token.

R rows   S slots   D head dim   X queries
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.codec import Fp8, Int2, Int4, Int8, Slots
from kvfold.codec.hadamard import CentredCodec, rotate
from tests.codec.common import relative_error, sample, slots_like_keys, there_and_back

each = pytest.mark.parametrize("codec", [Fp8(), Int8(), Int4(), Int2()], ids=lambda codec: type(codec).__name__.lower())
fine = pytest.mark.parametrize(("codec", "error"), [(Fp8(), 0.03), (Int8(), 0.01)], ids=["fp8", "int8"])


@each
def test_mean_is_over_valid_slots_of_each_row(codec: CentredCodec) -> None:
    x_RSD = torch.tensor([[[1.0], [3.0], [99.0]], [[5.0], [7.0], [9.0]], [[1.0], [1.0], [1.0]]])
    valid_RS = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    assert codec.init_state("k", x_RSD, valid_RS)["mean"].flatten().tolist() == [2.0, 7.0, 0.0]
    assert codec.init_state("v", x_RSD, valid_RS) == {}


def test_padding_that_is_not_a_number_leaves_the_mean_alone() -> None:
    x_RSD = torch.tensor([[[1.0, 2.0], [torch.nan, torch.inf]]])
    assert Int4().init_state("k", x_RSD, torch.tensor([[True, False]]))["mean"].tolist() == [[1.0, 2.0]]


@fine
def test_keys_are_stored_rotated_and_without_their_mean(codec: CentredCodec, error: float) -> None:
    x_RSD = slots_like_keys(2, 40, 64)
    exact = rotate(x_RSD - x_RSD.mean(1, keepdim=True))
    assert relative_error(there_and_back(codec, "k", x_RSD), exact) < error


@fine
def test_restored_keys_are_those_that_came(codec: CentredCodec, error: float) -> None:
    x_RSD = slots_like_keys(2, 40, 64)
    of = sample(codec, "k", x_RSD)
    kept = there_and_back(codec, "k", x_RSD).flatten(0, 1)
    assert relative_error(codec.restore("k", kept, of.state, of.slots.row_N), of.slots.x_ND) < error


@each
def test_each_slot_is_coded_against_the_mean_of_its_row(codec: CentredCodec) -> None:
    state = {"mean": torch.tensor([[4.0] * 8, [-4.0] * 8])}
    x_ND = torch.tensor([[-4.0] * 8, [4.0] * 8])
    stored = codec.encode("k", Slots(x_ND, torch.tensor([1, 0])), state)
    assert codec.decode("k", stored, torch.float32).abs().max() == 0


@fine
def test_channels_large_for_every_token_leave_differences_between_scores(codec: CentredCodec, error: float) -> None:
    """As in Qwen2.5's keys. Two of them: the largest number of a slot is a code of its own."""
    k_RSD = torch.randn(2, 96, 64, generator=torch.Generator().manual_seed(0))
    k_RSD[..., 5] += 300
    k_RSD[..., 9] -= 200
    q_RXD = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    turned_RXD, offset_RX = codec.query(q_RXD, sample(codec, "k", k_RSD).state)
    assert offset_RX is not None
    found_RXS = turned_RXD @ there_and_back(codec, "k", k_RSD).mT + offset_RX.unsqueeze(-1)
    assert relative_error(about_mean(found_RXS), about_mean(q_RXD @ k_RSD.mT)) < error


def about_mean(score_RXS: Tensor) -> Tensor:
    """What softmax sees of it."""
    return score_RXS - score_RXS.mean(-1, keepdim=True)


@each
def test_queries_keep_their_dtype_and_the_offset_is_fp32(codec: CentredCodec) -> None:
    of = sample(codec, "k", slots_like_keys(2, 8, 64))
    turned, offset = codec.query(torch.randn(2, 3, 64).bfloat16(), of.state)
    assert offset is not None
    assert (turned.dtype, offset.dtype, tuple(offset.shape)) == (torch.bfloat16, torch.float32, (2, 3))
