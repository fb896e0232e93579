"""Diagnostics of a few samples: fidelity to the full cache, decode-step time, and kept slots against an oracle.

B requests   V vocabulary   H KV heads   N tokens that were compressed
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kvfold.bench.batched_eval import EvalJob, EvalRequest
from kvfold.bench.fidelity import Fidelity, per_token
from kvfold.bench.oracle_overlap import OracleHits, kept_mask, later_mass, layer_overlap, oracle_hits
from kvfold.engine.runner import Runner
from kvfold.pages.sequence import SequenceCache

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
    kl, agreement, lost_nats = ((total_B / len(answer)).tolist() for total_B in totals_B)
    log2 = torch.log(torch.tensor(2.0)).item()
    return [Fidelity(len(answer), k, a, lost / log2) for k, a, lost in zip(kl, agreement, lost_nats, strict=True)]


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
