"""Observers for scorers while the model runs: the last queries, query moments, attention mass per slot.

Attention mass comes from a second pass over tiles, given each query's log-sum-exp: exp(q.k - lse) summed over queries.
No L x L map is ever formed.

    H KV heads   G query heads per KV head   Q query heads   T queries   S slots   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.attend.paged import read_parts
from kvfold.core import HAS_TRITON, LayerSpec
from kvfold.pages.observer_state import Moments, ObserverState
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.score.base import Needs

_TILE = 128  # queries per tile of the second pass
_NUM_SINKS = 4  # queries of attention sinks are not representative


@dataclass(frozen=True)
class ObserverNeeds:
    """What a phase has to observe for its scorers, allocators and fits."""

    last_queries: int
    mass: bool
    query_stats: bool
    new_queries: bool

    @classmethod
    def of(cls, policies: Sequence[Policy], *, decoding: bool) -> ObserverNeeds:
        """While decoding, last queries and moments are observed only if a trigger may fire; mass always is."""
        needs = [need for policy in policies for need in _stage_needs(policy, decoding)]
        return cls(
            last_queries=max((need.last_queries for need in needs), default=0),
            mass=any(policy.observes_mass for policy in policies),
            query_stats=any(need.query_stats for need in needs),
            new_queries=not decoding and any(need.new_queries for need in needs),
        )

    @property
    def anything(self) -> bool:
        return bool(self.last_queries) or self.mass or self.query_stats or self.new_queries


def _stage_needs(policy: Policy, decoding: bool) -> list[Needs]:
    stages = [policy.decode] if decoding else [policy.prefill, policy.decode]
    active = [stage for stage in stages if (stage.may_evict if decoding else stage.evicts)]
    budgets = [Needs(last_queries=stage.budget.last_queries) for stage in active]
    pruning = [] if decoding else [policy.token_pruning.needs]
    return [needs for stage in active for needs in (stage.score.needs, stage.evicted.needs)] + budgets + pruning


def observe_queries(sequence: SequenceCache, layer: int, q_QTD: Tensor, start: int, needs: ObserverNeeds) -> None:
    """Keep the last queries, add up the moments of pre-RoPE queries, from position `start` on."""
    spec, state = sequence.spec.layers[layer], sequence.observed.layers[layer]
    if not spec.compressible:
        return
    state.continue_at(start)
    if needs.last_queries:
        state.add_queries(q_QTD, needs.last_queries)
    if needs.query_stats:
        skipped = min(max(_NUM_SINKS - start, 0), q_QTD.shape[1])
        before = state.moments or Moments.empty(spec, q_QTD.device)
        state.moments = _with_moments(before, spec, q_QTD[:, skipped:], start + skipped)
    state.query_end = start + q_QTD.shape[1]


def _with_moments(before: Moments, spec: LayerSpec, q_QTD: Tensor, start: int) -> Moments:
    if q_QTD.is_cuda and HAS_TRITON:
        from kvfold.attend.kernels.moments import can_sum, summed

        if spec.rope is not None and can_sum(q_QTD, spec.rope):
            begun = before.begun(before_rope(spec, q_QTD[:, :_TILE], start))
            return begun.plus_sums(q_QTD.shape[1], *summed(q_QTD, spec.rope, start, begun.centre_QD))
    return before.plus(before_rope(spec, q_QTD, start))


def before_rope(spec: LayerSpec, q_QTD: Tensor, start: int) -> Tensor:
    """Queries at positions start, start + 1, … with RoPE undone."""
    if spec.rope is None:
        return q_QTD
    positions = torch.arange(start, start + q_QTD.shape[1], device=q_QTD.device)
    rotated = spec.rope.rotate(q_QTD.float(), -positions)
    rotary = spec.rope.rotary_dim
    return torch.cat((rotated[..., :rotary] / spec.rope.attention_scale, rotated[..., rotary:]), dim=-1)


def stored_mass(
    sequence: SequenceCache, layer: int, q_HGTD: Tensor, lse_HGT: Tensor, start: int, *, whole: bool = False
) -> Tensor:
    """Mass [H, S] the queries gave to the sealed slots they read (rows padded with 0)."""
    spec = sequence.spec.layers[layer]
    num_slots = max(sequence.stored_lens(layer), default=0)
    mass_HS = torch.zeros(spec.num_kv_heads, num_slots, device=q_HGTD.device)
    for part in read_parts(sequence, layer, q_HGTD, start, whole=whole):
        part.add_mass(mass_HS, lse_HGT, spec.scale)
    return mass_HS


def joined_mass(sequence: SequenceCache, layer: int, stored_HS: Tensor, new_HT: Tensor) -> Tensor:
    """Mass [H, S] of the stored slots of each head, then of new ones, in row order."""
    heads = zip(stored_HS, new_HT, sequence.stored_lens(layer), strict=True)
    return pad_sequence([torch.cat((old[:length], new)) for old, new, length in heads], batch_first=True)


def new_mass(q_HGTD: Tensor, k_HSD: Tensor, lse_HGT: Tensor, scale: float, offset: int) -> Tensor:
    """Mass [H, S] the queries gave to the tokens of their own pass; query t is token offset + t of it."""
    mass_HS = torch.zeros(k_HSD.shape[:2], device=q_HGTD.device)
    for begin in range(0, q_HGTD.shape[2], _TILE):
        q = q_HGTD[:, :, begin : begin + _TILE].float()
        end = offset + begin + q.shape[2]
        score = q @ k_HSD[:, :end].float().unsqueeze(1).transpose(-1, -2) * scale
        seen = torch.arange(end, device=q.device) <= torch.arange(offset + begin, end, device=q.device).unsqueeze(-1)
        weight = torch.exp(score - lse_HGT[:, :, begin : begin + _TILE].unsqueeze(-1)).masked_fill(~seen, 0.0)
        mass_HS[:, :end] += weight.sum((1, 2))
    return mass_HS


class ObserverSnapshot:
    """The observer states of some sequences now, to restore on rollback."""

    def __init__(self, sequences: Sequence[SequenceCache]) -> None:
        self._before = []
        for sequence in sequences:
            observed = sequence.observed.copy() if sequence.observed.is_live else sequence.observed
            self._before.append((sequence, sequence.sealed_len, [state.shallow_copy() for state in observed.layers]))

    def restore(self) -> None:
        """Sequences that have sealed tokens since are left as they are: their mass moved with the slots."""
        for sequence, sealed_len, layers in self._before:
            if sequence.sealed_len == sealed_len:
                sequence.observed = ObserverState([state.shallow_copy() for state in layers])


def forget_prompt(sequence: SequenceCache) -> None:
    """Drop observer state that only the prompt's compression needed."""
    needs = ObserverNeeds.of([sequence.policy], decoding=True)
    for state in sequence.observed.layers:
        if not needs.last_queries:
            state.last_q_QWD = None
        if not needs.query_stats:
            state.moments = None
