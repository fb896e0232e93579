"""A codec unlike those of the package, as a trial of the contract: it stores what the layer below does not tell.

Cross-layer coding (AQUA-KV, arXiv:2501.19392, keeps a predictor's residual) is the awkward case: encode and decode both
need the same slots of the layer below *as decoded*, and the bottom layer has none.

N flat slots   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from kvfold.codec import Codec, CrossLayerCodec, Field, Fields, Int8, Side, Slots, State
from kvfold.errors import InputError
from tests.codec.common import relative_error

ROWS = torch.zeros(50, dtype=torch.int64)
SIDES: tuple[Side, ...] = ("k", "v")


@dataclass(frozen=True)
class Residual(CrossLayerCodec):
    """int8 of the difference to the layer below, for both sides."""

    inner: ClassVar[Codec] = Int8()

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return self.inner.fields("v", head_dim, kv_dtype)

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        difference = Slots(slots.x_ND - _given(slots.below_ND), slots.row_N)
        return self.inner.encode("v", difference, state)

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype, below_ND: Tensor | None = None) -> Tensor:
        return (self.inner.decode("v", fields, torch.float32) + _given(below_ND)).to(dtype)


def _given(below_ND: Tensor | None) -> Tensor:
    if below_ND is None:
        raise InputError("residual codes came without the slots of the layer below; code the bottom layer with int8")
    return below_ND.float()


def stack_of_layers(num_layers: int) -> list[Tensor]:
    """Each layer is the one below and a little more."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(50, 64, generator=generator)]
    for _ in range(num_layers - 1):
        layers.append(layers[-1] + 0.05 * torch.randn(50, 64, generator=generator))
    return layers


@pytest.mark.parametrize("side", SIDES)
def test_layers_code_against_decoded_layers_all_the_way_up(side: Side) -> None:
    """Errors do not add up over layers, because each difference is to what the reader will really have."""
    exact = stack_of_layers(6)
    below = Int8().decode("v", Int8().encode("v", Slots(exact[0], ROWS), {}), torch.float32)
    for x_ND in exact[1:]:
        stored = Residual().encode(side, Slots(x_ND, ROWS, below_ND=below), {})
        below = Residual().decode(side, stored, torch.float32, below_ND=below)
        assert relative_error(below, x_ND) < 0.0005


def test_it_is_finer_than_int8_of_the_same_bytes() -> None:
    lower, upper = stack_of_layers(2)
    stored = Residual().encode("v", Slots(upper, ROWS, below_ND=lower), {})
    residual = relative_error(Residual().decode("v", stored, torch.float32, below_ND=lower), upper)
    plain = relative_error(Int8().decode("v", Int8().encode("v", Slots(upper, ROWS), {}), torch.float32), upper)
    assert residual < plain / 5


def test_slots_move_together_with_those_below() -> None:
    lower, upper = stack_of_layers(2)
    index = torch.tensor([41, 3, 7])
    whole = Residual().encode("k", Slots(upper, ROWS, below_ND=lower), {})
    moved = {name: stored[index] for name, stored in whole.items()}
    found = Residual().decode("k", moved, torch.float32, below_ND=lower[index])
    assert found.equal(Residual().decode("k", whole, torch.float32, below_ND=lower)[index])


def test_the_bottom_layer_is_refused() -> None:
    with pytest.raises(InputError, match="without the slots of the layer below"):
        Residual().encode("k", Slots(torch.zeros(50, 64), ROWS), {})
