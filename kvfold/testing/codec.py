"""The contract of a codec (kvfold/codec/base.py).

R rows   S slots of a row   N flat slots   D head dim   X queries of a row
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, Codec, Field, Side, Slots, State
from kvfold.errors import InputError
from kvfold.testing.rules import attempt, require, require_docstring, require_term

HEAD_DIMS = (48, 64, 80, 96, 128, 256)
_ROUNDING = 1e-6
_BAD = (torch.nan, torch.inf, -torch.inf)


@dataclass(frozen=True)
class Sample:
    """Flat slots of several rows, with the state learned from them."""

    slots: Slots
    state: State


def slots_like_keys(num_rows: int, num_slots: int, head_dim: int, seed: int = 0) -> Tensor:
    """[R, S, D] with what makes real keys hard: channels large for every slot, another set in each row."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.zeros(num_rows, 1, head_dim)
    for row in range(num_rows):
        bias[row, 0, row :: head_dim // 4] = 12.0
    return torch.randn(num_rows, num_slots, head_dim, generator=generator) + bias


def sample(codec: Codec, side: Side, x_RSD: Tensor) -> Sample:
    num_rows, num_slots, _ = x_RSD.shape
    state = codec.init_state(side, x_RSD, torch.ones(num_rows, num_slots, dtype=torch.bool))
    return Sample(Slots(x_RSD.flatten(0, 1), torch.arange(num_rows).repeat_interleave(num_slots)), state)


def there_and_back(codec: Codec, side: Side, x_RSD: Tensor) -> Tensor:
    """The slots [R, S, D] as they come back, in the stored basis."""
    of = sample(codec, side, x_RSD)
    return codec.decode(side, codec.encode(side, of.slots, of.state), torch.float32).view_as(x_RSD)


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def check_codec(codec: Codec, *, tolerance: float = 0.6) -> None:
    """AssertionError, with the rule as its text, if a codec breaks its contract.

    `tolerance` is the largest relative error of values and of q.k on normal numbers with biased channels: int2 stays
    below 0.6, int4 below 0.12, int8 below 0.01.
    """
    require_term(codec, Codec)
    if codec.needs_below or codec.needs_basis:
        raise InputError(f"{codec} needs the layer below or a basis; check_codec checks codecs of one layer alone")
    for side in SIDES:
        _group_fields_belong_to_codecs_that_cannot_move_a_slot(codec, side)
        for head_dim in HEAD_DIMS:
            for num_slots in (0, 32, 96):
                _fields_say_exactly_what_is_stored(codec, side, head_dim, num_slots)
            _codes_move_byte_for_byte(codec, side, head_dim)
        _decode_gives_slots_in_the_asked_dtype(codec, side)
        _neither_way_touches_what_it_was_given(codec, side)
        _a_broken_slot_harms_only_its_group(codec, side)
        for exponent in (-44, -20, 20, 38):
            numbers_survive(codec, side, 2, 5, exponent, 64)
    for head_dim in HEAD_DIMS:
        _values_come_back(codec, head_dim, tolerance)
        _scores_come_back(codec, head_dim, tolerance)
    _a_broken_slot_does_not_reach_the_state(codec)
    require_docstring(codec)


def numbers_survive(
    codec: Codec, side: Side, num_groups: int, odd: int, exponent: int, head_dim: int, seed: int = 0
) -> None:
    """Counts no page would have, and magnitudes from subnormal to fp32's largest, in every other slot."""
    if codec.as_floats:
        return
    num_slots = 32 * num_groups + (odd if codec.group(side) == 1 else 0)
    x_RSD = slots_like_keys(1, num_slots, head_dim, seed)
    x_RSD[:, ::2] *= 10.0**exponent
    rule = f"any number of slots of any magnitude must come back finite ({num_slots} slots times 1e{exponent}, {side})"
    found = attempt(there_and_back, codec, side, x_RSD, rule=rule)
    require(found.isfinite().all(), rule)


def _rows(field: Field, codec: Codec, side: Side, num_slots: int) -> int:
    return num_slots if field.per == "slot" else num_slots // codec.group(side)


def _fields_say_exactly_what_is_stored(codec: Codec, side: Side, head_dim: int, num_slots: int) -> None:
    of = sample(codec, side, slots_like_keys(2, num_slots, head_dim))
    rule = f"{num_slots} slots of {head_dim} channels must be encoded ({side})"
    found = attempt(codec.encode, side, of.slots, of.state, rule=rule)
    said = codec.fields(side, head_dim, torch.float32)
    names = sorted(field.name for field in said)
    require(sorted(found) == names, f"encode must return what fields() names: {names}, not {sorted(found)}")
    for field in said:
        stored, wanted = found[field.name], (_rows(field, codec, side, 2 * num_slots), field.width)
        is_said = (stored.dtype, tuple(stored.shape)) == (field.dtype, wanted)
        kept, told = f"{stored.dtype} {list(stored.shape)}", f"{field.dtype} {list(wanted)}"
        require(is_said, f"field {field.name} of {side} must be stored as fields() says: {told}, not {kept}")


def _group_fields_belong_to_codecs_that_cannot_move_a_slot(codec: Codec, side: Side) -> None:
    grouped = any(field.per == "group" for field in codec.fields(side, 64, torch.float32))
    require(grouped == (codec.group(side) > 1), f'a codec has fields per="group" exactly if group("{side}") is above 1')
    require(not (codec.relocatable and grouped), 'a codec with fields per="group" must set relocatable = False')


def _decode_gives_slots_in_the_asked_dtype(codec: Codec, side: Side) -> None:
    for num_slots in (0, 32):
        of = sample(codec, side, slots_like_keys(1, num_slots, 64))
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            found = codec.decode(side, codec.encode(side, of.slots, of.state), dtype)
            rule = f"decode must return [{num_slots}, 64] in {dtype}, not {list(found.shape)} in {found.dtype}"
            require((found.dtype, tuple(found.shape)) == (dtype, (num_slots, 64)), rule)


def _neither_way_touches_what_it_was_given(codec: Codec, side: Side) -> None:
    x_RSD = slots_like_keys(2, 32, 64)
    of = sample(codec, side, x_RSD.clone())
    fields = codec.encode(side, of.slots, of.state)
    require(of.slots.x_ND.equal(x_RSD.flatten(0, 1)), "encode must not write to the slots it is given")
    before = {name: stored.clone() for name, stored in fields.items()}
    codec.decode(side, fields, torch.float32)
    untouched = all(fields[name].equal(before[name]) for name in before)
    require(untouched, "decode must not write to the fields it is given")


def _values_come_back(codec: Codec, head_dim: int, tolerance: float) -> None:
    v_RSD = slots_like_keys(2, 64, head_dim) - 6.0
    error = relative_error(there_and_back(codec, "v", v_RSD), v_RSD)
    require(error <= tolerance, f"values must come back within {tolerance}; their relative error is {error:.3g}")


def _scores_come_back(codec: Codec, head_dim: int, tolerance: float) -> None:
    k_RSD = slots_like_keys(3, 64, head_dim)
    q_RXD = torch.randn(3, 5, head_dim, generator=torch.Generator().manual_seed(1))
    turned_RXD, offset_RX = codec.query(q_RXD, sample(codec, "k", k_RSD).state)
    scores = turned_RXD @ there_and_back(codec, "k", k_RSD).mT
    found = scores if offset_RX is None else scores + offset_RX.unsqueeze(-1)
    error = relative_error(found, q_RXD @ k_RSD.mT)
    rule = f"query(q).decode(encode(k)) + offset must be q.k within {tolerance}; its relative error is {error:.3g}"
    require(error <= tolerance + _ROUNDING, rule)


def _codes_move_byte_for_byte(codec: Codec, side: Side, head_dim: int) -> None:
    """Encode then index == index then encode: what eviction and compaction rely on."""
    if not codec.relocatable:
        return
    of = sample(codec, side, slots_like_keys(2, 33, head_dim))
    whole = codec.encode(side, of.slots, of.state)
    shuffled = torch.randperm(66, generator=torch.Generator().manual_seed(0))
    for index in (torch.tensor([5]), shuffled[:31], torch.arange(66)):
        part = codec.encode(side, Slots(of.slots.x_ND[index], of.slots.row_N[index]), of.state)
        rule = f"a slot's code must not depend on its neighbours ({side}), or relocatable must be False"
        require(all(part[name].equal(whole[name][index]) for name in whole), rule)


def _a_broken_slot_harms_only_its_group(codec: Codec, side: Side) -> None:
    if codec.as_floats:  # floats are kept as they come
        x_RSD = torch.tensor([[[1.0, *_BAD]]])
        same = torch.allclose(there_and_back(codec, side, x_RSD), x_RSD, rtol=0, atol=0, equal_nan=True)
        require(same, "a codec that stores floats (as_floats) must keep NaN and infinity as they come")
        return
    of = sample(codec, side, slots_like_keys(1, 96, 64))
    clean = codec.decode(side, codec.encode(side, of.slots, of.state), torch.float32)
    group = codec.group(side)
    first = 40 // group * group
    others = torch.ones(96, dtype=torch.bool)
    others[first : first + group] = False
    for bad in _BAD:
        broken = of.slots.x_ND.clone()
        broken[40, 3] = bad
        found = codec.decode(side, codec.encode(side, Slots(broken, of.slots.row_N), of.state), torch.float32)
        require(found.isfinite().all(), f"a slot with {bad} in it must come back finite ({side})")
        require(found[others].equal(clean[others]), f"a slot with {bad} in it must not change other slots ({side})")


def _a_broken_slot_does_not_reach_the_state(codec: Codec) -> None:
    if codec.as_floats:
        return
    x_RSD = slots_like_keys(1, 32, 64)
    x_RSD[0, 0, 0], x_RSD[0, 1, 0] = torch.nan, torch.inf
    state = codec.init_state("k", x_RSD, torch.ones(1, 32, dtype=torch.bool))
    finite = all(part.isfinite().all() for part in state.values())
    require(finite, "a slot with NaN or infinity in it must not reach the state (init_state)")
