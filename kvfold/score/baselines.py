"""Baselines: `full` (no eviction), `recent` (sliding window), `streaming` (sinks and a window), `random`.

R rows   S slots
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View


@register("score", "full")
@dataclass(frozen=True)
class Full(Scorer):
    """Keep every slot: no size, no eviction."""

    keeps_all = True  # unannotated: class data, not an argument of the term

    def score(self, view: View) -> Tensor:
        return view.masked(torch.full_like(view.position_RS, torch.inf, dtype=torch.float32))


@register("score", "recent")
@dataclass(frozen=True)
class Recent(Scorer):
    """Keep the latest tokens.

    score = position - seen. Positions alone decide, so it may drop slots between prefill chunks by default.
    """

    @property
    def default_prefill_trigger(self) -> str:
        return "between_chunks"

    def score(self, view: View) -> Tensor:
        return view.masked(recency(view))


def recency(view: View) -> Tensor:
    """Minus the age of each slot. Counted from the end, so that fp32 tells the latest 16M tokens apart."""
    return (view.position_RS - view.seen_R.unsqueeze(-1)).float()


@register("score", "streaming", paper="arXiv:2309.17453", published="as published with `slot`")
@dataclass(frozen=True)
class Streaming(Recent):
    """Keep the first `sinks` tokens and the latest ones.

    Softmax must put its mass somewhere, and trained models put it on the first tokens; a window that drops them breaks.
    score = +inf for positions below `sinks`, else position - seen. The recent window is what the size leaves.

    Against the paper: sinks default to its 4; which position a kept key has is the `position` axis (`slot` is the
    paper's choice, the default keeps original positions). Against kvpress: sinks are told by position, not by slot,
    so repeated compression never loses them.
    """

    sinks: int = 4
    least = (("sinks", 0),)

    @property
    def needs(self) -> Needs:
        return Needs(sinks=self.sinks)

    def score(self, view: View) -> Tensor:
        return view.masked(recency(view).masked_fill(view.position_RS < self.sinks, torch.inf))


_LOW_32 = 0xFFFFFFFF


@register("score", "random")
@dataclass(frozen=True)
class Random(Scorer):
    """Keep slots at random.

    score = hash(seed, 0, layer, head, position), uniform in [0, 1) with 24 bits. A hash of what a slot is, not a draw
    from a generator: the same slot has the same score on every device, in every batch and after every earlier eviction.
    kvpress draws from one seeded generator and repeats the same numbers in every layer.
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
