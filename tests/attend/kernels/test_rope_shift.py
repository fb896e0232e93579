"""Turned queries from the kernel, against its twin and against the rotation itself."""

from __future__ import annotations

import pytest
import torch

from kvfold.attend.kernels import ops, reference
from tests.attend.kernels.common import DEVICE
from tests.pages.tiny import rope

turn = pytest.importorskip("kvfold.attend.kernels.rope_shift", reason="triton is not installed")


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (96, 96), (80, 32), (128, 128)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_row_is_turned_by_each_of_its_shifts(
    head_dim: int, rotary_dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(head_dim)
    kind = rope(head_dim, rotary_dim=rotary_dim, interleaved=interleaved)
    q_RXD = torch.randn(3, 5, head_dim, device=DEVICE).to(dtype)
    shift_RV = torch.tensor([[0, 7], [3_000_000, 1], [12, 131_072]], dtype=torch.int32, device=DEVICE)
    arguments = (q_RXD, shift_RV, kind.inverse_periods(q_RXD.device), interleaved)
    found, want = turn.launch(*arguments), reference.rotated_query(*arguments)
    loose = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, want, atol=loose, rtol=loose)
    alone = kind.rotate(q_RXD[1], -shift_RV[1, 0].expand(5))
    torch.testing.assert_close(found[2], alone, atol=loose, rtol=loose)
    assert torch.equal(found[0], q_RXD[0])


def test_torch_finds_the_declared_schema_true() -> None:
    q_RXD, shift_RV = torch.randn(2, 3, 16, device=DEVICE), torch.ones(2, 4, dtype=torch.int32, device=DEVICE)
    arguments = (q_RXD, shift_RV, rope(16).inverse_periods(q_RXD.device), False)
    torch.library.opcheck(ops.rotated_query, arguments, test_utils=("test_schema", "test_faketensor"))
