"""What is measured on a few samples only: fidelity to the full cache, the time of a step, and what was kept.

    B lanes   V vocabulary   H KV heads   N tokens that were compressed
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kvfold.bench.fidelity import Fidelity, per_token
from kvfold.bench.lanes import Job, Lane
from kvfold.bench.overlap import Hits, hits, kept_mask, later_mass, layer_overlap
from kvfold.engine.runner import Runner
from kvfold.pages.sequence import SequenceCache

_TIMED_STEPS = 5
_DECIMALS = 4


@dataclass(frozen=True)
class Choice:
    """What the layers of a cache kept: see `kvfold.bench.record.Diagnostic`."""

    layers: tuple[int, ...]
    hit_rate: tuple[float, ...]
    mass_kept: tuple[float, ...]
    share_kept: tuple[float, ...]
    overlap: tuple[tuple[float, ...], ...]


def fidelities(runner: Runner, lanes: Sequence[Lane], forks: Sequence[SequenceCache], full: Lane) -> list[Fidelity]:
    """Every lane along the full cache's answer; forks are of the lanes before they decoded, that of `full` included.

    All are fed the same tokens, whatever they would have said. One step's logits are held at a time.
    """
    at = lanes.index(full)
    answer = full.token_ids
    totals_B = [torch.zeros(len(lanes), dtype=torch.float64) for _ in range(3)]
    for token, after in zip([full.job.prompt.last_id, *answer], answer, strict=False):
        logits_BV = runner.decode(forks, [token] * len(forks))
        found = per_token(logits_BV[at].expand_as(logits_BV), logits_BV, [after] * len(lanes))
        totals_B = [total_B + row_B.double().cpu() for total_B, row_B in zip(totals_B, found, strict=True)]
    kl, agreement, lost_nats = ((total_B / len(answer)).tolist() for total_B in totals_B)
    log2 = torch.log(torch.tensor(2.0)).item()
    return [Fidelity(len(answer), k, a, lost / log2) for k, a, lost in zip(kl, agreement, lost_nats, strict=True)]


def step_ms(runner: Runner, lane: Lane) -> float:
    """Median time of a decode step of this cache alone, after one to warm up. The lane goes on from where it ended."""
    times = []
    for _ in range(1 + _TIMED_STEPS):
        began = time.perf_counter()
        runner.decode([lane.sequence], [lane.next_id]).argmax(-1).tolist()  # waits for the device
        times.append(1000 * (time.perf_counter() - began))
    return median(times[1:])


def kept_masks(lane: Lane) -> dict[int, Tensor]:
    """What each layer that chooses holds of the compressed tokens, bool [H, N]."""
    layers = lane.sequence.spec.compressible_layers
    return {layer: kept_mask(lane.sequence, layer, len(lane.job.compressed)) for layer in layers}


def choices(runner: Runner, masks: dict[Job, dict[int, Tensor]], full: Lane) -> dict[Job, Choice]:
    """Jobs of one prompt and mode against the attention of what came later: question and the full cache's answer."""
    prompt, mode = full.job.prompt, full.job.mode
    later = (*prompt.rest(mode), prompt.last_id, *full.token_ids)
    mass = later_mass(runner, full.job.compressed, later)
    return {job: _choice(kept, mass) for job, kept in masks.items()}


def _choice(kept: dict[int, Tensor], mass: dict[int, Tensor]) -> Choice:
    layers = tuple(layer for layer in kept if layer in mass)
    found: list[Hits] = [hits(kept[layer], mass[layer]) for layer in layers]
    overlap = layer_overlap([kept[layer] for layer in layers]).tolist()
    return Choice(
        layers,
        tuple(round(each.hit_rate, _DECIMALS) for each in found),
        tuple(round(each.mass_kept, _DECIMALS) for each in found),
        tuple(round(each.share_kept, _DECIMALS) for each in found),
        tuple(tuple(round(value, _DECIMALS) for value in row) for row in overlap),
    )
