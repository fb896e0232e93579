"""Diagnostics of a few samples: fidelity to the full cache, decode-step time, and kept slots against an oracle.

A task's score mixes the selection of slots with all that follows. Here the slots that a cache kept are compared with
the attention mass that later tokens give to every slot of the full cache (the oracle that H2O, arXiv:2306.14048,
estimates from the past):

    hit rate  = |kept ∩ top| / |top|, where top are as many slots as were kept, those of largest later mass
    mass kept = later mass on kept slots / later mass on all

A random selection has a hit rate equal to the share of slots it keeps. Layers are compared by the Jaccard index
|a ∩ b| / |a ∪ b| of the positions that their heads kept.

    B requests   V vocabulary   H KV heads   N tokens that were compressed   L layers   R heads of all layers
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kvfold.bench.batched_eval import EvalJob, EvalRequest
from kvfold.bench.fidelity import Fidelity, per_token
from kvfold.engine.runner import Runner
from kvfold.errors import InputError
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

_OBSERVING = "h2o + 1x"  # evicts nothing, and accumulates the attention mass of every slot
_TIMED_STEPS = 5
_DECIMALS = 4


@dataclass(frozen=True)
class KeptSlots:
    """Kept slots by layer: see `kvfold.bench.record.Diagnostic`."""

    layers: tuple[int, ...]
    hit_rate: tuple[float, ...]
    mass_kept: tuple[float, ...]
    share_kept: tuple[float, ...]
    overlap: tuple[tuple[float, ...], ...]


def fidelities(
    runner: Runner, requests: Sequence[EvalRequest], forks: Sequence[SequenceCache], full: EvalRequest
) -> list[Fidelity]:
    """Fidelity of every request along the full cache's answer (teacher forcing); `forks`: the requests' caches before
    decoding, that of `full` included. One step's logits are in memory at a time."""
    at = requests.index(full)
    answer = full.token_ids
    totals_B = [torch.zeros(len(requests), dtype=torch.float64) for _ in range(3)]
    for token, after in zip([full.job.prompt.last_id, *answer], answer, strict=False):
        logits_BV = runner.decode(forks, [token] * len(forks))
        found = per_token(logits_BV[at].expand_as(logits_BV), logits_BV, [after] * len(requests))
        totals_B = [total_B + row_B.double().cpu() for total_B, row_B in zip(totals_B, found, strict=True)]
    kl, agreement, lost = ((total_B / len(answer)).tolist() for total_B in totals_B)
    return [Fidelity(len(answer), k, a, nats / math.log(2)) for k, a, nats in zip(kl, agreement, lost, strict=True)]


def step_ms(runner: Runner, request: EvalRequest) -> float:
    """Median time of a decode step of this cache alone, after one warm-up step."""
    times = []
    for _ in range(1 + _TIMED_STEPS):
        began = time.perf_counter()
        runner.decode([request.sequence], [request.next_id]).argmax(-1).tolist()  # waits for the device
        times.append(1000 * (time.perf_counter() - began))
    return median(times[1:])


def kept_masks(request: EvalRequest) -> dict[int, Tensor]:
    """By compressible layer, which of the compressed tokens are kept, bool [H, N]."""
    layers = request.sequence.spec.compressible_layers
    return {layer: kept_mask(request.sequence, layer, len(request.job.compressed)) for layer in layers}


def kept_slots(runner: Runner, masks: dict[EvalJob, dict[int, Tensor]], full: EvalRequest) -> dict[EvalJob, KeptSlots]:
    """Kept slots of jobs of one prompt and mode against the attention of the question and the full-cache answer."""
    prompt, mode = full.job.prompt, full.job.mode
    later = (*prompt.rest(mode), prompt.last_id, *full.token_ids)
    mass = later_mass(runner, full.job.compressed, later)
    return {job: _kept_slots(kept, mass) for job, kept in masks.items()}


def _kept_slots(kept: dict[int, Tensor], mass: dict[int, Tensor]) -> KeptSlots:
    layers = tuple(layer for layer in kept if layer in mass)
    found: list[OracleHits] = [oracle_hits(kept[layer], mass[layer]) for layer in layers]
    overlap = layer_overlap([kept[layer] for layer in layers]).tolist()
    return KeptSlots(
        layers,
        tuple(round(each.hit_rate, _DECIMALS) for each in found),
        tuple(round(each.mass_kept, _DECIMALS) for each in found),
        tuple(round(each.share_kept, _DECIMALS) for each in found),
        tuple(tuple(round(value, _DECIMALS) for value in row) for row in overlap),
    )


@dataclass(frozen=True)
class OracleHits:
    """Of one layer, averaged over its heads."""

    hit_rate: float
    mass_kept: float
    share_kept: float  # of the slots: the hit rate of a random selection


def later_mass(runner: Runner, tokens: Sequence[int], later: Sequence[int]) -> dict[int, Tensor]:
    """By layer, the attention mass [H, N] that later tokens give to the prompt's positions in the full cache, summed
    over the query heads of a group (GQA); sliding-window layers are left out."""
    sequence = runner.new_sequence(Policy.parse(_OBSERVING))
    try:
        runner.prefill([sequence], [tokens])
        for side in sequence.observed.layers:  # the prompt's own attention does not count
            side.mass_HS = None
        runner.prefill([sequence], [later])
        masses = {layer: side.mass_HS for layer, side in enumerate(sequence.observed.layers)}
        return {layer: mass_HS[:, : len(tokens)].cpu() for layer, mass_HS in masses.items() if mass_HS is not None}
    finally:
        sequence.release()


def kept_mask(sequence: SequenceCache, layer: int, num_tokens: int) -> Tensor:
    """Which of the first `num_tokens` tokens the heads of a layer keep, bool [H, N]."""
    heads = range(sequence.spec.layers[layer].num_kv_heads)
    return mask_of([sequence.positions(layer, head) for head in heads], num_tokens)


def mask_of(positions: Sequence[Tensor], num_tokens: int) -> Tensor:
    """Positions of each head as bool [H, N]; those of tokens that came after are left out."""
    kept_HN = torch.zeros(len(positions), num_tokens, dtype=torch.bool)
    for row_N, position in zip(kept_HN, positions, strict=True):
        row_N[position[position < num_tokens]] = True
    return kept_HN


def oracle_hits(kept_HN: Tensor, mass_HN: Tensor) -> OracleHits:
    """Kept slots against the oracle mass; a head without slots has a hit rate of 0."""
    if kept_HN.shape != mass_HN.shape or not kept_HN.numel():
        shapes = f"{tuple(kept_HN.shape)} and {tuple(mass_HN.shape)}"
        raise InputError(f"kept slots and mass have shapes {shapes}; give both as [heads, tokens] of one layer")
    count_H = kept_HN.sum(-1)
    rank_HN = mass_HN.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
    top_HN = rank_HN < count_H.unsqueeze(-1)
    hit_H = (kept_HN & top_HN).sum(-1) / count_H.clamp(min=1)
    mass_H = (mass_HN * kept_HN).sum(-1) / mass_HN.sum(-1).clamp(min=torch.finfo(mass_HN.dtype).tiny)
    return OracleHits(float(hit_H.mean()), float(mass_H.mean()), float(kept_HN.float().mean()))


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
