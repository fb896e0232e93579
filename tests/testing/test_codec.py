"""`check_codec` names the rule that a codec breaks: each example changes one thing of a codec that keeps them all.

N flat slots   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvfold.codec import Codec, Field, Fields, MiniCache, Side, Slots, State
from kvfold.errors import InputError
from kvfold.testing import check_codec

_LARGEST = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Half(Codec):
    """fp16, with numbers that it cannot hold clipped."""

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("x", torch.float16, head_dim),)

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        return {"x": slots.x_ND.nan_to_num().clamp(-_LARGEST, _LARGEST).half()}

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        return fields["x"].to(dtype).nan_to_num()


class MoreFields(Half):
    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return (*super().fields(side, head_dim, kv_dtype), Field("scale", torch.float16, 1))


class OtherWidth(Half):
    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("x", torch.float16, head_dim + 1),)


class OnlySomeDims(Half):
    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        return {"x": slots.x_ND.view(-1, 64).half()}


class Grouped(Half):
    def group(self, side: Side) -> int:
        return 16


class GroupedAndMoved(Grouped):
    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("x", torch.float16, head_dim, per="group"),)


class AlwaysFp32(Half):
    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        return fields["x"].float().nan_to_num()


class WritesSlots(Half):
    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        return {"x": slots.x_ND.nan_to_num_().clamp_(-10, 10).half()}


class WritesFields(Half):
    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        found = fields["x"].to(dtype, copy=True)
        fields["x"].zero_()
        return found


class ForgetsValues(Half):
    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        return super().decode(side, fields, dtype) * (side == "k")


class ForgetsTheMean(Half):
    def has_state(self, side: Side) -> bool:
        return side == "k"

    def init_state(self, side: Side, x_RSD: Tensor, valid_RS: Tensor) -> State:
        return {"mean": x_RSD.nan_to_num(posinf=0.0).sum(1) / max(x_RSD.shape[1], 1)}

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        mean_ND = state["mean"][slots.row_N] if side == "k" else 0.0
        return super().encode(side, Slots(slots.x_ND - mean_ND, slots.row_N), state)


class Neighbours(Half):
    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        found = super().encode(side, slots, state)
        return {"x": (found["x"].float() + found["x"].float().mean(0, keepdim=True) * 0.001).half()}


class KeepsNan(Half):
    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        return {"x": slots.x_ND.clamp(-_LARGEST, _LARGEST).half()}

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        return fields["x"].to(dtype)


class SpreadsNan(Half):
    relocatable: ClassVar[bool] = False  # it looks at its neighbours only where one of them is broken

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        return {"x": super().encode(side, slots, state)["x"] * bool(slots.x_ND.isfinite().all())}


class Overflows(Half):
    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        return {"x": slots.x_ND.nan_to_num(posinf=0.0, neginf=0.0).half()}

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        return fields["x"].to(dtype)


class MeanOfNan(ForgetsTheMean):
    def init_state(self, side: Side, x_RSD: Tensor, valid_RS: Tensor) -> State:
        return {"mean": x_RSD.mean(1) * 0}


class MendsFloats(Half):
    as_floats: ClassVar[bool] = True


BROKEN = [
    (MoreFields, r"must return what fields\(\) names: \['scale', 'x'\], not \['x'\]"),
    (OtherWidth, r"field x of k must be stored as fields\(\) says: .* not "),
    (OnlySomeDims, "32 slots of 48 channels must be encoded|as fields"),
    (Grouped, r'fields per="group" exactly if group\("k"\) is above 1'),
    (GroupedAndMoved, "must set relocatable = False"),
    (AlwaysFp32, r"decode must return \[0, 64\] in torch.bfloat16, not \[0, 64\] in torch.float32"),
    (WritesSlots, "encode must not write to the slots"),
    (WritesFields, "decode must not write to the fields"),
    (ForgetsValues, "values must come back within 0.1; their relative error is 1"),
    (ForgetsTheMean, r"\+ offset must be q.k within 0.1"),
    (Neighbours, "a slot's code must not depend on its neighbours"),
    (KeepsNan, "a slot with nan in it must come back finite"),
    (SpreadsNan, "a slot with nan in it must not change other slots"),
    (Overflows, "any number of slots of any magnitude must come back finite"),
    (MeanOfNan, r"must not reach the state \(init_state\)"),
    (MendsFloats, "must keep NaN and infinity as they come"),
]


@pytest.mark.parametrize(("broken", "rule"), BROKEN)
def test_a_broken_rule_is_named(broken: type[Half], rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        check_codec(broken(), tolerance=0.1)


def test_a_codec_that_keeps_the_contract_passes() -> None:
    check_codec(Half(), tolerance=0.001)
    with pytest.raises(AssertionError, match="values must come back within 1e-05"):
        check_codec(Half(), tolerance=1e-5)


def test_codecs_of_several_layers_are_refused() -> None:
    with pytest.raises(InputError, match="checks codecs of one layer alone"):
        check_codec(MiniCache())
