"""Lifts nobody measured, for tests of what is done with them.

C channels of a token
"""

from __future__ import annotations

import torch

from kvfold.codec.base import SIDES
from kvfold.codec.lifts import Lifts, SideLift, lifted_layers
from kvfold.core import ModelSpec


def random_lifts(spec: ModelSpec, seed: int = 0) -> Lifts:
    """Maps that keep lengths about as they are."""
    generator = torch.Generator().manual_seed(seed)
    layers = {}
    for i in lifted_layers(spec):
        width = spec.layers[i].num_kv_heads * spec.layers[i].head_dim
        layers[i] = {
            side: SideLift(
                torch.randn(width, width, generator=generator) / width**0.5, torch.randn(width, generator=generator)
            )
            for side in SIDES
        }
    return Lifts(spec.name, spec.weights_digest, "drawn", layers)
