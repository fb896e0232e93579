"""`random`: slots kept at random, the baseline of every scorer.

Randomness is a hash of what a slot is (seed, layer, head, position), not a draw from a generator, so the same slot has
the same score on every device, in every batch and after every earlier eviction.

    R rows   S slots
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Scorer, View

_LOW_32 = 0xFFFFFFFF


@register("score", "random")
@dataclass(frozen=True)
class Random(Scorer):
    """Keep slots at random.

    score = hash(seed, 0, layer, head, position), uniform in [0, 1) with 24 bits. kvpress draws from one
    seeded generator and repeats the same numbers in every layer.
    """

    seed: int = 0

    def score(self, view: View) -> Tensor:
        head_R = torch.arange(view.position_RS.shape[0], device=view.position_RS.device) % view.num_heads
        hash_RS = torch.zeros_like(view.position_RS)
        for part in (self.seed, 0, view.layer, head_R.unsqueeze(-1), view.position_RS):
            hash_RS = mix(hash_RS ^ part)
        return view.masked((hash_RS >> 8).float() / 2**24)


def mix(x: Tensor) -> Tensor:
    """Spread the low 32 bits of x so that every input bit moves every output bit (MurmurHash3's finaliser).

    int64 products wrap alike on every device, and only their low 32 bits are used. The constant added first keeps 0
    from mapping to itself.
    """
    x = (x + 0x9E3779B9) & _LOW_32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW_32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW_32
    return x ^ (x >> 16)
