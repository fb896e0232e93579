"""Codes of 8, 4, 2 or 1 bits in bytes, in split order: byte b holds channels b, b + W, b + 2W, .. from its low bits up.

    D = 8, 4 bits: W = 4    byte 0: channel 0 (bits 0-3), channel 4 (bits 4-7);  byte 1: channels 1, 5;  ..

So the low half of all bytes is the first half of the channels, and a reader can use half-width (int2: quarter-width)
dots against contiguous parts of q instead of interleaving.

    N flat slots   D head dim   W bytes per slot (D * bits / 8)
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.errors import PolicyError


def packed_width(head_dim: int, bits: int) -> int:
    """Bytes of one slot's codes."""
    parts = 8 // bits
    if head_dim % parts:
        raise PolicyError(
            f"head dim {head_dim} does not fill bytes of {parts} codes; {bits}-bit codecs need a multiple of {parts}, "
            "use int8 for this model"
        )
    return head_dim // parts


def pack(codes_ND: Tensor, bits: int) -> Tensor:
    """Bytes [N, W] of uint8 codes [N, D]."""
    width = packed_width(codes_ND.shape[-1], bits)
    packed_NW = codes_ND[..., :width].contiguous()
    for part in range(1, 8 // bits):
        packed_NW = packed_NW | (codes_ND[..., part * width : (part + 1) * width] << (part * bits))
    return packed_NW


def unpack(packed_NW: Tensor, bits: int) -> Tensor:
    """Codes [N, D] as uint8: shifts and masks of whole bytes, then one copy."""
    if bits == 8:
        return packed_NW
    mask = (1 << bits) - 1
    parts = [(packed_NW >> shift) & mask if shift else packed_NW & mask for shift in range(0, 8 - bits, bits)]
    return torch.cat([*parts, packed_NW >> (8 - bits)], dim=-1)
