"""One-bit sketch of keys (RaBitQ): an estimate of q.k from the sign of each channel, to select slots.

Keys are rotated, so that no channel stands out. Of a page the mean y is kept in 8-bit codes, and of each slot the signs
s of what is left, r = rotate(k) - y, with one factor (RaBitQ, arXiv:2405.12497):

    rotate(q).(y + |r|² / sum |r| * s)      which is q.k itself for q along r, and right on average over rotations

The mean takes away what the keys of neighbours share, such as large biases of the key projection, which RoPE turns
slowly in most channels: without it, bits would be spent on what is the same for all. For 128 channels in bf16 and pages
of 16 slots a sketch takes 26 bytes beside a slot's 516.

    M pages   P slots of a page   D head dim   B bytes of a slot's bits   H KV heads   X queries of a head
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.codec import grid, hadamard, packing
from kvfold.codec.base import Field
from kvfold.policy.reader import Summaries

_BITS = 8  # of the mean


def fields(head_dim: int) -> tuple[Field, ...]:
    return (
        Field("sign", torch.uint8, _padded(head_dim) // 8),
        Field("factor", grid.META, 1),
        Field("mean", torch.uint8, head_dim, per="page"),
        Field("mean_grid", grid.META, 2, per="page"),  # scale, then zero
    )


def sketch(k_MPD: Tensor, used_MP: Tensor) -> dict[str, Tensor]:
    """The rows of all fields; unused slots hold anything."""
    y_MPD = rotate(grid.finite(k_MPD).masked_fill(~used_MP.unsqueeze(-1), 0.0))
    mean_MD = y_MPD.sum(1) / used_MP.sum(1).clamp(min=1).unsqueeze(-1)
    kept = grid.stored(grid.span(mean_MD, _BITS, dim=-1), _BITS)
    code_MD = grid.to_codes(mean_MD, kept, _BITS)
    rest_MPD = y_MPD - _decoded(code_MD, kept.scale, kept.zero).unsqueeze(1)
    length_MP = rest_MPD.abs().sum(-1)
    factor_MP = rest_MPD.square().sum(-1) / torch.where(length_MP > 0, length_MP, 1.0)
    bit_MPD = functional.pad((rest_MPD >= 0).to(torch.uint8), (0, _padded(y_MPD.shape[-1]) - y_MPD.shape[-1]))
    return {
        "sign": packing.pack(bit_MPD, 1),
        "factor": factor_MP.unsqueeze(-1),
        "mean": code_MD,
        "mean_grid": torch.cat((kept.scale, kept.zero), dim=-1),
    }


def products(q_HXD: Tensor, kept: Summaries) -> Tensor:
    """q.k as sketches tell it, fp32 [H, X, M * P]; of slots that are not used anything but NaN."""
    q_HXD = rotate(q_HXD)
    num_heads, _, head_dim = q_HXD.shape
    factor_HMP = kept.read("factor").float()
    sign_HSB = kept.read("sign").view(num_heads, factor_HMP[0].numel(), -1)
    bit_HSD = packing.unpack(sign_HSB, 1)[..., :head_dim].to(q_HXD.dtype)
    # q.s of signs s = 2 bit - 1
    along_HXS = 2 * (q_HXD @ bit_HSD.mT) - q_HXD.sum(-1, keepdim=True)
    scale_HM1, zero_HM1 = kept.read("mean_grid").split(1, dim=-1)
    mean_HXM = q_HXD @ _decoded(kept.read("mean"), scale_HM1, zero_HM1).mT
    found = along_HXS * factor_HMP.flatten(1).unsqueeze(1)
    return found + mean_HXM.repeat_interleave(factor_HMP.shape[-1], dim=-1)


def rotate(x: Tensor) -> Tensor:
    """Hadamard's rotation after some channels changed their sign: codecs may have rotated once already, and twice would
    be not at all."""
    return hadamard.rotate(x.float() * _flips(x.shape[-1], x.device))


@cache
def _flips(head_dim: int, device: torch.device) -> Tensor:
    """1 or -1 for each channel."""
    bit_D = torch.randint(0, 2, (head_dim,), generator=torch.Generator().manual_seed(0))
    return (2.0 * bit_D - 1.0).to(device)


def _decoded(code: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return code.float() * scale.float() + zero.float()


def _padded(head_dim: int) -> int:
    """Bits of a slot, whole bytes."""
    return -(-head_dim // 8) * 8
