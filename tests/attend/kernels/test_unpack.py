"""Every byte becomes the number that its codec says, by plain arithmetic and by the GPU's bit operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attend.kernels.common import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvfold.attend.kernels.unpack import unpack

BYTES = torch.arange(256, dtype=torch.int64)
WANTED = {
    ("fp8", 8): [BYTES.to(torch.uint8).view(torch.float8_e4m3fn).float()],
    ("int", 8): [BYTES.float() - 128],
    ("int", 4): [((BYTES >> shift) & 15).float() + 128 for shift in (0, 4)],
    ("int", 2): [((BYTES >> shift) & 3).float() + 128 for shift in (0, 2, 4, 6)],
}
FORMS = sorted(WANTED)


@triton.jit
def unpack_kernel(code: tl.tensor, out: tl.tensor, FORM: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr) -> None:
    i = tl.arange(0, 256)
    a, b, c, d = unpack(tl.load(code + i), FORM, BITS, PLAIN)
    tl.store(out + i, a)
    tl.store(out + 256 + i, b)
    tl.store(out + 512 + i, c)
    tl.store(out + 768 + i, d)


def unpacked(form: str, bits: int, *, plain: bool) -> Tensor:
    """bf16 [4, 256]: the parts of all bytes."""
    out = torch.full((4, 256), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    unpack_kernel[(1,)](BYTES.to(DEVICE, torch.uint8), out, form, bits, plain)
    return out.cpu()


@pytest.mark.parametrize(("form", "bits"), FORMS)
def test_plain_arithmetic_gives_the_codec_s_numbers(form: str, bits: int) -> None:
    found = unpacked(form, bits, plain=True)
    for part, want in zip(found, WANTED[form, bits], strict=False):
        kept = want.isfinite()  # two bytes are NaN as e4m3
        assert part.float()[kept].equal(want[kept]) and kept.sum() >= 254


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("form", "bits"), FORMS)
def test_bit_operations_give_the_same_bits(form: str, bits: int) -> None:
    parts = len(WANTED[form, bits])
    plain, packed = (unpacked(form, bits, plain=plain)[:parts] for plain in (True, False))
    assert packed.view(torch.int16).equal(plain.view(torch.int16))
