"""Every part of a word becomes the number that its codec says, by plain arithmetic and by the GPU's bit operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.attend.kernels.common import DEVICE

pytest.importorskip("triton")

import triton
import triton.language as tl

from kvfold.attend.kernels.unpack import unpack

WORDS = torch.arange(1 << 16, dtype=torch.int64)
BYTES = [(WORDS >> shift) & 255 for shift in (0, 8)]
WANTED = {
    ("fp8", 8): [byte.to(torch.uint8).view(torch.float8_e4m3fn).float() for byte in BYTES],
    ("int", 8): [byte.float() - 128 for byte in BYTES],
    ("int", 4): [((WORDS >> shift) & 15).float() + 128 for shift in range(0, 16, 4)],
    ("int", 2): [((WORDS >> shift) & 3).float() + 128 for shift in range(0, 16, 2)],
}
PARTS = [(form, bits, part) for (form, bits), parts in sorted(WANTED.items()) for part in range(len(parts))]


@triton.jit
def unpack_kernel(
    word: tl.tensor, out: tl.tensor, PART: tl.constexpr, FORM: tl.constexpr, BITS: tl.constexpr, PLAIN: tl.constexpr
) -> None:
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(out + i, unpack(tl.load(word + i), PART, FORM, BITS, PLAIN))


def unpacked(form: str, bits: int, part: int, *, plain: bool) -> Tensor:
    """bf16 [65536]: one part of all words."""
    out = torch.full((1 << 16,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    unpack_kernel[(16,)](WORDS.to(DEVICE, torch.int16), out, part, form, bits, plain)
    return out.cpu()


@pytest.mark.parametrize(("form", "bits", "part"), PARTS)
def test_plain_arithmetic_gives_the_codec_s_numbers(form: str, bits: int, part: int) -> None:
    found, want = unpacked(form, bits, part, plain=True).float(), WANTED[form, bits][part]
    kept = want.isfinite()  # two bytes are NaN as e4m3
    assert found[kept].equal(want[kept]) and kept.sum() >= 254 * 256


@pytest.mark.skipif(DEVICE == "cpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("form", "bits", "part"), PARTS)
def test_bit_operations_give_the_same_bits(form: str, bits: int, part: int) -> None:
    plain, packed = (unpacked(form, bits, part, plain=plain) for plain in (True, False))
    assert packed.view(torch.int16).equal(plain.view(torch.int16))
