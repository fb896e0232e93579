"""What every registered codec promises, run over the registry.

R rows   S slots of a row   N flat slots   D head dim   X queries of a row
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold.codec import Codec, Field, Side, Slots
from tests.codec.common import CODECS, HEAD_DIMS, SIDES, relative_error, sample, slots_like_keys, there_and_back

each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
each_side = pytest.mark.parametrize("side", SIDES)
each_dim = pytest.mark.parametrize("head_dim", HEAD_DIMS)
movable = pytest.mark.parametrize(
    "codec",
    [codec for codec in CODECS.values() if codec.relocatable],
    ids=[n for n, c in CODECS.items() if c.relocatable],
)
mending = [name for name in CODECS if name not in ("native", "bf16")]  # the two keep floats as they come

# Relative error of q.k and of the values that no run on normal data with biased channels reaches.
TOLERANCE = {
    "native": 0.0,
    "bf16": 0.004,
    "fp8": 0.04,
    "int8": 0.01,
    "int4": 0.12,
    "int2": 0.6,
    "kivi4": 0.1,
    "kivi2": 0.5,
}


def rows_of(field: Field, codec: Codec, side: Side, num_slots: int) -> int:
    return num_slots if field.per == "slot" else num_slots // codec.group(side)


def test_the_registry_holds_the_promised_codecs() -> None:
    assert set(CODECS) == set(TOLERANCE)


@each_codec
@each_side
@each_dim
@pytest.mark.parametrize("num_slots", [0, 32, 96])
def test_fields_say_exactly_what_is_stored(codec: Codec, side: Side, head_dim: int, num_slots: int) -> None:
    of = sample(codec, side, slots_like_keys(2, num_slots, head_dim))
    found = codec.encode(side, of.slots, of.state)
    said = codec.fields(side, head_dim, torch.float32)
    assert set(found) == {field.name for field in said}
    for field in said:
        stored = found[field.name]
        assert (stored.dtype, tuple(stored.shape)) == (
            field.dtype,
            (rows_of(field, codec, side, 2 * num_slots), field.width),
        )
        assert stored.numel() * stored.element_size() == field.bytes() * stored.shape[0]


@each_codec
@each_side
def test_group_fields_belong_to_codecs_that_cannot_move_a_slot(codec: Codec, side: Side) -> None:
    grouped = any(field.per == "group" for field in codec.fields(side, 64, torch.float32))
    assert grouped == (codec.group(side) > 1)
    assert not (codec.relocatable and grouped)


@each_codec
@each_side
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_slots", [0, 32])
def test_decode_gives_slots_in_the_asked_dtype(codec: Codec, side: Side, dtype: torch.dtype, num_slots: int) -> None:
    of = sample(codec, side, slots_like_keys(1, num_slots, 64))
    found = codec.decode(side, codec.encode(side, of.slots, of.state), dtype)
    assert (found.dtype, tuple(found.shape)) == (dtype, (num_slots, 64))


@each_codec
@each_side
def test_neither_way_touches_what_it_was_given(codec: Codec, side: Side) -> None:
    x_RSD = slots_like_keys(2, 32, 64)
    of = sample(codec, side, x_RSD.clone())
    fields = codec.encode(side, of.slots, of.state)
    before = {name: stored.clone() for name, stored in fields.items()}
    codec.decode(side, fields, torch.float32)
    assert of.slots.x_ND.equal(x_RSD.flatten(0, 1))
    assert all(fields[name].equal(before[name]) for name in before)


@pytest.mark.parametrize("name", CODECS)
@each_dim
def test_values_come_back(name: str, head_dim: int) -> None:
    v_RSD = slots_like_keys(2, 64, head_dim) - 6.0
    assert relative_error(there_and_back(CODECS[name], "v", v_RSD), v_RSD) <= TOLERANCE[name]


@pytest.mark.parametrize("name", CODECS)
@each_dim
def test_scores_come_back(name: str, head_dim: int) -> None:
    """q.k == query(q).decode(encode(k)) + offset, in another basis or not."""
    codec, k_RSD = CODECS[name], slots_like_keys(3, 64, head_dim)
    q_RXD = torch.randn(3, 5, head_dim, generator=torch.Generator().manual_seed(1))
    of = sample(codec, "k", k_RSD)
    turned_RXD, offset_RX = codec.query(q_RXD, of.state)
    scores = turned_RXD @ there_and_back(codec, "k", k_RSD).mT
    found = scores if offset_RX is None else scores + offset_RX.unsqueeze(-1)
    assert relative_error(found, q_RXD @ k_RSD.mT) <= TOLERANCE[name] + 1e-6


@movable
@each_side
@each_dim
def test_codes_move_byte_for_byte(codec: Codec, side: Side, head_dim: int) -> None:
    """Encode then index == index then encode: what eviction and compaction rest on."""
    of = sample(codec, side, slots_like_keys(2, 33, head_dim))
    whole = codec.encode(side, of.slots, of.state)
    for index in (torch.tensor([5]), torch.randperm(66)[:31], torch.arange(66)):
        part = codec.encode(side, Slots(of.slots.x_ND[index], of.slots.row_N[index]), of.state)
        assert all(part[name].equal(whole[name][index]) for name in whole)


@pytest.mark.parametrize("name", mending)
@each_side
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_slot_harms_only_its_group(name: str, side: Side, bad: float) -> None:
    codec, x_RSD = CODECS[name], slots_like_keys(1, 96, 64)
    of = sample(codec, side, x_RSD)
    broken = of.slots.x_ND.clone()
    broken[40, 3] = bad
    clean = codec.decode(side, codec.encode(side, of.slots, of.state), torch.float32)
    found = codec.decode(side, codec.encode(side, Slots(broken, of.slots.row_N), of.state), torch.float32)
    first = 40 // codec.group(side) * codec.group(side)
    others = torch.ones(96, dtype=torch.bool)
    others[first : first + codec.group(side)] = False
    assert found.isfinite().all()
    assert found[others].equal(clean[others])


@pytest.mark.parametrize("name", mending)
def test_a_broken_slot_does_not_reach_the_state(name: str) -> None:
    x_RSD = slots_like_keys(1, 32, 64)
    x_RSD[0, 0, 0] = torch.nan
    x_RSD[0, 1, 0] = torch.inf
    state = CODECS[name].init_state("k", x_RSD, torch.ones(1, 32, dtype=torch.bool))
    assert all(learned.isfinite().all() for learned in state.values())


@pytest.mark.parametrize("name", ["native", "bf16"])
@each_side
def test_floats_are_kept_as_they_come(name: str, side: Side) -> None:
    x_RSD = torch.tensor([[[1.0, torch.nan, torch.inf, -torch.inf]]])
    torch.testing.assert_close(there_and_back(CODECS[name], side, x_RSD), x_RSD, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", mending)
@each_side
@settings(max_examples=40, deadline=None)
@given(
    num_groups=st.integers(0, 3),
    odd=st.integers(0, 31),
    exponent=st.integers(-44, 38),
    head_dim=st.sampled_from(HEAD_DIMS),
    seed=st.integers(0, 1 << 30),
)
def test_any_count_and_size_of_numbers_survives(
    name: str, side: Side, num_groups: int, odd: int, exponent: int, head_dim: int, seed: int
) -> None:
    """Counts no page would have, and magnitudes from subnormal to fp32's largest, in every other slot."""
    codec = CODECS[name]
    num_slots = 32 * num_groups + (odd if codec.group(side) == 1 else 0)
    x_RSD = slots_like_keys(1, num_slots, head_dim, seed)
    x_RSD[:, ::2] *= 10.0**exponent
    found = there_and_back(codec, side, x_RSD)
    assert found.shape == x_RSD.shape
    assert found.isfinite().all()
