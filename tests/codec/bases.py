"""Bases nobody measured, for tests of what is done with them.

G groups   X channels of a group
"""

from __future__ import annotations

import torch

from kvfold.codec.base import SIDES
from kvfold.codec.basis import Bases, SideBasis
from kvfold.core import ModelSpec


def random_bases(spec: ModelSpec, num_heads: int, seed: int = 0) -> Bases:
    """Of every compressible layer; values are worth ten times as much as keys."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for i in spec.compressible_layers:
        groups, width = spec.layers[i].num_kv_heads // num_heads, num_heads * spec.layers[i].head_dim
        layers[i] = {
            side: SideBasis(
                torch.randn(groups, width, generator=generator),
                torch.linalg.qr(torch.randn(groups, width, width, generator=generator)).Q,
                torch.arange(width, 0, -1.0).expand(groups, -1) * (10 if side == "v" else 1),
            )
            for side in SIDES
        }
    return Bases(spec.name, spec.weights_digest, "drawn", num_heads, layers)
