"""`native` and `bf16`: what they keep."""

from __future__ import annotations

import pytest
import torch

from kvfold.codec import Bf16, Native, Slots

ROWS = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_native_keeps_every_bit(dtype: torch.dtype) -> None:
    x_ND = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    fields = Native().encode("k", Slots(x_ND, ROWS), {})
    (field,) = Native().fields("k", 8, dtype)
    assert fields[field.name].dtype == field.dtype
    assert Native().decode("k", fields, dtype).equal(x_ND)
    assert Native.lossless


def test_bf16_rounds_to_nearest() -> None:
    x_ND = torch.tensor([[1.0, 1.0 + 2**-9, 1.0 + 2**-7 + 2**-9]])
    fields = Bf16().encode("k", Slots(x_ND, ROWS[:1]), {})
    assert Bf16().decode("k", fields, torch.float32).tolist() == [[1.0, 1.0, 1.0 + 2**-7]]
    assert not Bf16.lossless
