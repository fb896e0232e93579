"""`kivi4`, `kivi2`: grids along the slots of a channel for keys, along the channels of a slot for values.

N flat slots   D head dim   M groups of 32 slots
"""

from __future__ import annotations

import pytest
import torch

from kvfold.codec import Int4, Kivi2, Kivi4, Slots
from kvfold.codec.kivi import KiviCodec
from kvfold.errors import InputError
from tests.codec.common import relative_error, slots_like_keys, there_and_back

each = pytest.mark.parametrize("codec", [Kivi4(), Kivi2()], ids=["kivi4", "kivi2"])


@pytest.mark.parametrize(("codec", "k_bytes", "v_bytes"), [(Kivi4(), 64 + 16, 64 + 16), (Kivi2(), 32 + 16, 32 + 16)])
def test_bytes_of_one_slot(codec: KiviCodec, k_bytes: int, v_bytes: int) -> None:
    """128 channels; 32 slots share 128 scales and zeros of keys, a slot has 4 of each for values."""
    k = sum(field.bytes() / (32 if field.per == "group" else 1) for field in codec.fields("k", 128, torch.bfloat16))
    v = sum(field.bytes() for field in codec.fields("v", 128, torch.bfloat16))
    assert (k, v) == (k_bytes, v_bytes)


@each
def test_groups(codec: KiviCodec) -> None:
    assert (codec.group("k"), codec.group("v"), codec.relocatable) == (32, 1, False)


@each
def test_key_grids_run_along_slots(codec: KiviCodec) -> None:
    """A channel that is constant over 32 slots comes back, however different the channels and the groups are."""
    x_ND = torch.cat((torch.arange(64.0).expand(32, 64), -1000 * torch.arange(64.0).expand(32, 64)))
    torch.testing.assert_close(there_and_back(codec, "k", x_ND[None])[0], x_ND, rtol=2.0**-14, atol=0)


@each
def test_value_grids_run_along_channels(codec: KiviCodec) -> None:
    """32 channels that are constant within a slot come back, however different the slots are."""
    x_ND = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)).repeat_interleave(32, 1)
    torch.testing.assert_close(there_and_back(codec, "v", x_ND[None])[0], x_ND, rtol=2.0**-14, atol=0)


@each
@pytest.mark.parametrize(("head_dim", "num_groups"), [(48, 2), (64, 2), (80, 4), (96, 3), (256, 8)])
def test_value_groups_of_head_dims_that_32_does_not_divide(codec: KiviCodec, head_dim: int, num_groups: int) -> None:
    widths = {field.name: field.width for field in codec.fields("v", head_dim, torch.float32)}
    assert widths["scale"] == widths["zero"] == num_groups


@each
def test_repeating_the_last_slot_leaves_the_others_as_they_are(codec: KiviCodec) -> None:
    x_ND = slots_like_keys(1, 32, 64)[0]
    x_ND[20:] = x_ND[19]
    more_ND = torch.cat((x_ND, x_ND[-1:].expand(32, -1)))
    once, more = (codec.encode("k", Slots(x, torch.zeros(len(x), dtype=torch.int64)), {}) for x in (x_ND, more_ND))
    assert more["code"][:32].equal(once["code"])
    assert more["scale"][:1].equal(once["scale"])


@each
def test_a_broken_group_is_refused(codec: KiviCodec) -> None:
    with pytest.raises(InputError, match="33 slots do not fill key groups of 32"):
        codec.encode("k", Slots(torch.zeros(33, 64), torch.zeros(33, dtype=torch.int64)), {})


def test_channels_of_different_size_are_where_it_beats_a_grid_per_slot() -> None:
    k_RSD = torch.randn(1, 320, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 64)
    per_channel = there_and_back(Kivi4(), "k", k_RSD)[0, :, :8]
    per_slot = there_and_back(Int4(), "v", k_RSD)[0, :, :8]
    exact = k_RSD[0, :, :8]
    assert relative_error(per_channel, exact) < 0.1 < relative_error(per_slot, exact)
