"""Input of a compression round: a layer's new slots, the `View` that scorers get, and the bytes that sizes refer to.

H KV heads   R rows (the KV heads of one sequence)   S slots, stored then new   T new slots   D head dim
Q query heads   W window of queries
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.budget.base import Scores
from kvfold.core import LayerSpec
from kvfold.evicted.base import CalibrationTargets
from kvfold.pages.async_copy import upload
from kvfold.pages.layer import LayerChange
from kvfold.pages.layout import state_bytes
from kvfold.pages.observer_state import MASS_BYTES, LayerObserverState, Moments
from kvfold.pages.read import StoredSlots, stored_slots
from kvfold.pages.segment import TABLE_BYTES
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.size import SizeFacts
from kvfold.score.base import Needs, QueryStats, View
from kvfold.score.predictor import predictor_for


@dataclass
class NewSlots:
    """The slots a pass adds to one layer of one sequence, usually at consecutive positions, and what was observed."""

    k_HTD: Tensor
    v_HTD: Tensor
    start: int  # position of the first
    mass_HS: Tensor | None = None  # attention mass of stored and new slots after this pass
    q_QTD: Tensor | None = None  # their queries
    replay_HGS: Tensor | None = None  # the largest weight that a replay gave stored and new slots
    targets: CalibrationTargets | None = None  # outputs to some of its queries, for `fit`
    kept_T: Tensor | None = None  # which tokens of the pass they are, if others were pruned; the last is kept
    num_pruned: int = 0  # tokens pruned before this layer
    # By scorer and protection, shared by the policies of a pass.
    scored: dict[object, Scores] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.k_HTD.shape[1]

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.start + self.num_tokens + self.num_pruned

    @property
    def position_T(self) -> Tensor:
        if self.kept_T is not None:
            return self.start + self.kept_T
        return torch.arange(self.start, self.end, device=self.k_HTD.device)

    def since(self, position: int) -> NewSlots:
        """Without the slots before a position."""
        skipped = min(max(position - self.start, 0), self.num_tokens)
        return NewSlots(self.k_HTD[:, skipped:], self.v_HTD[:, skipped:], self.start + skipped)

    @cached_property
    def without_mass(self) -> NewSlots:
        """For policies that do not observe mass."""
        return replace(self, mass_HS=None)

    @cached_property
    def whole(self) -> LayerChange:
        """All of them, as a change that evicts nothing."""
        num_heads = self.k_HTD.shape[0]
        position_N = self.position_T.repeat(num_heads)
        counts = [self.num_tokens] * num_heads
        return LayerChange(self.k_HTD.flatten(0, 1), self.v_HTD.flatten(0, 1), position_N, counts)


def size_facts(sequence: SequenceCache, seen_len: int) -> SizeFacts:
    """What a size expression refers to, for one sequence at a committed length."""
    spec = sequence.spec
    layers = [(i, spec.layers[i]) for i in spec.compressible_layers]
    num_heads = sum(layer.num_kv_heads for _, layer in layers)
    slot_bytes = sum(c * layer.num_kv_heads for c, (_, layer) in zip(slot_costs(sequence), layers, strict=True))
    padding = sum(sequence.page_class(i).bytes_per_page * layer.num_kv_heads for i, layer in layers)
    mass_bytes = MASS_BYTES if sequence.policy.observes_mass else 0
    return SizeFacts(
        num_tokens=seen_len,
        num_heads=num_heads,
        bytes_per_slot=slot_bytes / max(num_heads, 1),
        overhead_bytes=sequence.block_bytes
        + sum(_observer_bytes(sequence, layer) for _, layer in layers)
        + mass_bytes * sequence.config.open_len * num_heads
        + padding
        + sum(state_bytes(sequence.page_class(i), layer.num_kv_heads) for i, layer in layers)
        + len({sequence.page_class(i) for i, _ in layers}) * sequence.arena.superblock_bytes
        + TABLE_BYTES * num_heads
        + (round(slot_bytes) * sequence.config.open_len if sequence.policy.decode.may_evict else 0),
        open_len=sequence.config.open_len,
        full_bytes=sum(seen_len * layer.num_kv_heads * layer.head_dim * 4 for _, layer in layers),
    )


def slot_costs(sequence: SequenceCache) -> list[float]:
    """Bytes of one sealed slot of one head, for each compressible layer. If decoding evicts, no two pages of a head
    need be adjacent: each counts with its own page-table entry."""
    mass_bytes = MASS_BYTES if sequence.policy.observes_mass else 0
    entry_bytes = TABLE_BYTES if sequence.policy.decode.may_evict else 0
    classes = [sequence.page_class(i) for i in sequence.spec.compressible_layers]
    return [c.bytes_per_slot + entry_bytes / c.page_size + mass_bytes for c in classes]


def slots_cost(sequence: SequenceCache, costs: Sequence[float], counts: Sequence[Sequence[int]]) -> float:
    """Bytes of so many slots in each head of some layers; attention mass is kept in rows as long as the longest."""
    mass_bytes = MASS_BYTES if sequence.policy.observes_mass else 0
    padding = sum(max(heads) * len(heads) - sum(heads) for heads in counts)
    return sum(cost * sum(heads) for cost, heads in zip(costs, counts, strict=True)) + mass_bytes * padding


def _observer_bytes(sequence: SequenceCache, layer: LayerSpec) -> int:
    """Observer state of a layer while a decode trigger may fire."""
    stage = sequence.policy.decode
    if not stage.may_evict:
        return 0
    needs = stage.score.needs
    window = max(needs.last_queries, stage.evicted.needs.last_queries, stage.budget.last_queries)
    queries = window * layer.num_query_heads * layer.head_dim * sequence.spec.dtype.itemsize
    return queries + (Moments.num_bytes(layer) if needs.query_stats else 0)


def build_view(sequence: SequenceCache, index: int, new: NewSlots, needs: Needs) -> View:
    """Stored and new slots of one layer side by side, with exactly what the scorer needs."""
    spec, device = sequence.spec.layers[index], new.k_HTD.device
    stored = stored_slots(sequence, index, new.k_HTD.dtype)
    lens = [length + new.num_tokens for length in stored.lens]
    if sequence.policy.position.shifts and (needs.last_queries or needs.query_stats):
        stored.k = _at_slot_positions(sequence, spec, stored)
    view = View(
        layer=index,
        num_layers=sequence.spec.num_layers,
        spec=spec,
        num_heads=spec.num_kv_heads,
        k_RSD=_joined(stored.k, new.k_HTD),
        v_RSD=_joined(stored.v, new.v_HTD),
        position_RS=_joined(stored.position, new.position_T.expand(spec.num_kv_heads, -1)),
        valid_RS=torch.arange(max(lens), device=device) < upload(lens, device).unsqueeze(-1),
        seen_R=torch.full((spec.num_kv_heads,), new.end, device=device),
    )
    if sequence.page_class(index).has_bias:
        view.bias_RS = _joined(stored.bias, torch.zeros(new.k_HTD.shape[:2], device=device))
    _fill_observations(view, sequence.observed.layers[index], new, needs)
    if needs.sentence_len:
        view.sentence_RS = sequence.sentences.numbers(view.position_RS, needs.sentence_len)
    if needs.predictor is not None:
        view.predictor = predictor_for(sequence.spec, needs.predictor).at(index, device)
    return view


def _at_slot_positions(sequence: SequenceCache, spec: LayerSpec, stored: StoredSlots) -> list[Tensor]:
    """Keys rotated to their `slot` positions, for scores that multiply queries with them."""
    if spec.rope is None:
        return stored.k
    found = []
    for k_nD, position_n in zip(stored.k, stored.position, strict=True):
        first = sequence.sealed_len - len(k_nD)
        apparent_n = torch.arange(first, sequence.sealed_len, device=k_nD.device)
        found.append(spec.rope.rotate(k_nD, apparent_n - position_n))
    return found


def _joined(stored: Sequence[Tensor], new: Tensor) -> Tensor:
    """Rows of stored slots, then new ones, padded with 0 on the right; the new ones themselves if nothing is stored."""
    if not any(len(row) for row in stored):
        return new
    return pad_sequence([torch.cat(parts) for parts in zip(stored, new, strict=True)], batch_first=True)


def _fill_observations(view: View, state: LayerObserverState, new: NewSlots, needs: Needs) -> None:
    """What the scorer asks for: the observation window of SnapKV and others (last queries), attention mass, moments."""
    shape = (view.num_heads, view.spec.group)
    if needs.last_queries:
        assert state.last_q_QWD is not None
        q_QWD = state.last_q_QWD[:, -needs.last_queries :]
        # Drafts that have run may follow the slots that are sealed.
        positions = torch.arange(state.query_end - q_QWD.shape[1], state.query_end, device=q_QWD.device)
        view.q_RGWD, view.q_position_RW = q_QWD.unflatten(0, shape), positions.expand(view.num_heads, -1)
    if needs.new_queries:
        none_QTD = new.k_HTD.new_empty(view.spec.num_query_heads, 0, view.spec.head_dim)
        view.new_q_RGTD = (none_QTD if new.q_QTD is None else new.q_QTD).unflatten(0, shape)
    if needs.mass:
        view.mass_RS = new.mass_HS
        view.mass_count_RS = (new.end - view.position_RS).clamp(min=1).float() * view.spec.group
    if needs.replay is not None:
        view.replay_RGS = new.replay_HGS
    if needs.output:
        view.wo_HGDM = view.spec.wo_HGDM
    if needs.query_stats:
        assert state.moments is not None
        mean_QD, cov_QDD = state.moments.mean_and_covariance()
        view.stats = QueryStats(mean_QD.unflatten(0, shape), cov_QDD.unflatten(0, shape))
