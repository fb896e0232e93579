"""Delta quantization of CacheGen: per group of tokens an 8-bit anchor, the others as quantized differences to it.

tokens 0, GROUP, 2 GROUP …: x is about symbol · scale of the token
all others:                 x is about mean + weight · (anchor - mean) of the channel + symbol · bin of the head

    T tokens   A anchors   H heads   C channels of all heads
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

GROUP = 64  # tokens
_MOST = 127  # symbols on either side of 0
_WEIGHTS = 8  # steps of a weight from 0 to 1
_MOST_FP16 = np.float32(65504)

Floats = NDArray[np.float32]


class Quantised(NamedTuple):
    symbol_TC: NDArray[np.int8]
    scale_A: Floats
    bin_H: Floats
    mean_C: NDArray[np.float16]
    weight_C: NDArray[np.uint8]


def num_anchors(num_tokens: int) -> int:
    return -(-num_tokens // GROUP)


def quantise(x_THD: Floats, bin_share: float) -> Quantised:
    """A head's bin is `bin_share` of its mean difference, or wider if needed to fit the largest one."""
    x_TC = x_THD.reshape(len(x_THD), -1)
    anchor_AC = x_TC[::GROUP]
    scale_A = np.abs(anchor_AC).max(1) / np.float32(_MOST)
    anchor_symbol_AC = np.rint(_divide(anchor_AC, scale_A[:, None]))
    mean_C = _means(x_TC)
    base_TC = _spread(anchor_symbol_AC * scale_A[:, None], len(x_TC)) - mean_C
    weight_C = _weights(x_TC - mean_C, base_TC)
    difference_THD = (x_TC - mean_C - _weighted(base_TC, weight_C)).reshape(x_THD.shape)
    difference_THD[::GROUP] = 0
    size_THD = np.abs(difference_THD)
    bin_H = np.maximum(np.float32(bin_share) * size_THD.mean((0, 2)), size_THD.max((0, 2)) / np.float32(_MOST))
    symbol_TC = np.rint(_divide(difference_THD, bin_H[:, None])).reshape(x_TC.shape)
    symbol_TC[::GROUP] = anchor_symbol_AC
    return Quantised(symbol_TC.astype(np.int8), scale_A, bin_H, mean_C.astype(np.float16), weight_C)


def dequantise(found: Quantised, head_dim: int) -> Floats:
    """[T, H, D]; not finite only where scales, bins or means are not finite or too large."""
    symbol_TC, num_tokens = found.symbol_TC.astype(np.float32), len(found.symbol_TC)
    mean_C = found.mean_C.astype(np.float32)
    anchor_AC = symbol_TC[::GROUP] * found.scale_A[:, None]
    x_TC = symbol_TC * np.repeat(found.bin_H, head_dim) + mean_C
    x_TC += _weighted(_spread(anchor_AC, num_tokens) - mean_C, found.weight_C)
    x_TC[::GROUP] = anchor_AC
    return x_TC.reshape(num_tokens, -1, head_dim)


def _spread(anchor_AC: Floats, num_tokens: int) -> Floats:
    """Each token's anchor."""
    return np.repeat(anchor_AC, GROUP, 0)[:num_tokens]


def _means(x_TC: Floats) -> Floats:
    """Channel means over non-anchor tokens, rounded to fp16: a prompt's first token is often an outlier."""
    others_NC = np.delete(x_TC, np.s_[::GROUP], 0)
    mean_C: Floats = others_NC.sum(0) / np.float32(max(len(others_NC), 1))
    return mean_C.clip(-_MOST_FP16, _MOST_FP16).astype(np.float16).astype(np.float32)


def _weights(x_TC: Floats, base_TC: Floats) -> NDArray[np.uint8]:
    """Least-squares weight of a channel's anchor, over non-anchor tokens."""
    x_NC, base_NC = (np.delete(part_TC, np.s_[::GROUP], 0) for part_TC in (x_TC, base_TC))
    share_C: Floats = _divide((x_NC * base_NC).sum(0), (base_NC * base_NC).sum(0))
    steps_C: Floats = np.rint(_WEIGHTS * share_C.clip(0, 1))
    return steps_C.astype(np.uint8)


def _weighted(base_TC: Floats, weight_C: NDArray[np.uint8]) -> Floats:
    return base_TC * (weight_C.astype(np.float32) / np.float32(_WEIGHTS))


def _divide(x: Floats, by: Floats) -> Floats:
    """0 where `by` is 0 (x is 0 there, too)."""
    return np.divide(x, by, out=np.zeros_like(x), where=by > 0)
