"""What a scorer chose, looked at by itself: did it keep what later queries attend to, and do layers agree?

A policy's score on a task mixes the choice of slots with all that follows. Here the slots that a cache kept are held
against the attention mass that later tokens give to every slot of the full cache (the oracle that H2O,
arXiv:2306.14048, estimates from the past):

    hit rate  = |kept ∩ top| / |top|, where top are as many slots as were kept, those of largest later mass
    mass kept = later mass on kept slots / later mass on all

A choice by chance hits the share of slots that it keeps. Layers are compared by the Jaccard index |a ∩ b| / |a ∪ b| of
the positions that their heads kept.

    H KV heads   N tokens of the prompt   L layers   R heads of all layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

_WATCHING = "h2o + 1x"  # keeps everything, and adds up the mass of every slot


@dataclass(frozen=True)
class Hits:
    """Of one layer, averaged over its heads."""

    hit_rate: float
    mass_kept: float
    share_kept: float  # of the slots: the hit rate of chance


def later_mass(runner: Runner, tokens: Sequence[int], later: Sequence[int]) -> dict[int, Tensor]:
    """Mass [H, N], by position, that later tokens give to a prompt in the full cache, by layer; layers with a sliding
    window choose nothing and are left out. Query heads of a group are added up."""
    sequence = runner.new_sequence(Policy.parse(_WATCHING))
    try:
        runner.prefill([sequence], [tokens])
        for side in sequence.observed.layers:  # what the prompt gave to itself does not count
            side.mass_HS = None
        runner.prefill([sequence], [later])
        masses = {layer: side.mass_HS for layer, side in enumerate(sequence.observed.layers)}
        return {layer: mass_HS[:, : len(tokens)].cpu() for layer, mass_HS in masses.items() if mass_HS is not None}
    finally:
        sequence.release()


def kept_mask(sequence: SequenceCache, layer: int, num_tokens: int) -> Tensor:
    """Which of the first tokens the heads of a layer hold, bool [H, N]."""
    heads = range(sequence.spec.layers[layer].num_kv_heads)
    return mask_of([sequence.positions(layer, head) for head in heads], num_tokens)


def mask_of(positions: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Positions of each head as bool [H, N]; those of tokens that came after are left out."""
    kept_HN = torch.zeros(len(positions), num_tokens, dtype=torch.bool)
    for row_N, position in zip(kept_HN, positions, strict=True):
        row_N[position[position < num_tokens]] = True
    return kept_HN


def hits(kept_HN: Tensor, mass_HN: Tensor) -> Hits:
    """The slots that heads kept against the mass that came later; heads that kept nothing hit nothing."""
    if kept_HN.shape != mass_HN.shape or not kept_HN.numel():
        shapes = f"{tuple(kept_HN.shape)} and {tuple(mass_HN.shape)}"
        raise InputError(f"kept slots and mass have shapes {shapes}; give both as [heads, tokens] of one layer")
    count_H = kept_HN.sum(-1)
    rank_HN = mass_HN.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    top_HN = rank_HN < count_H.unsqueeze(-1)
    hit_H = (kept_HN & top_HN).sum(-1) / count_H.clamp(min=1)
    mass_H = (mass_HN * kept_HN).sum(-1) / mass_HN.sum(-1).clamp(min=torch.finfo(mass_HN.dtype).tiny)
    return Hits(float(hit_H.mean()), float(mass_H.mean()), float(kept_HN.float().mean()))


def layer_overlap(kept: Sequence[Tensor]) -> Tensor:
    """Jaccard index [L, L] of what layers kept, each given as bool [H, N]: the mean over pairs of heads, one of each.

    Within a layer, pairs of different heads; 1 where there is but one.
    """
    if not kept or len({kept_HN.shape[-1] for kept_HN in kept}) > 1:
        raise InputError(f"{len(kept)} layers to compare; give one or more as [heads, tokens] of the same tokens")
    sizes = [len(kept_HN) for kept_HN in kept]
    rows = [block.split(sizes, dim=1) for block in jaccard(torch.cat(list(kept))).split(sizes)]
    return torch.stack([_means(blocks, layer) for layer, blocks in enumerate(rows)])


def jaccard(kept_RN: Tensor) -> Tensor:
    """Jaccard index [R, R] of every pair of rows; two empty rows are equal."""
    kept = kept_RN.double()
    both_RR = kept @ kept.T
    count_R = kept.sum(-1)
    either_RR = count_R.unsqueeze(-1) + count_R - both_RR
    return torch.where(either_RR == 0, 1.0, both_RR / either_RR.clamp(min=1)).float()


def _means(blocks: Sequence[Tensor], layer: int) -> Tensor:
    """Of one layer with each, [L]; with itself, heads are not compared with themselves."""
    means = [block_HH.mean() for block_HH in blocks]
    own_HH = blocks[layer]
    if len(own_HH) > 1:
        means[layer] = own_HH[~torch.eye(len(own_HH), dtype=torch.bool)].mean()
    return torch.stack(means)
