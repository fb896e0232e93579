"""One round of compression: score the slots of every layer, share out the budget, choose, and write what stays.

Layers arrive in order. An allocator of scope "layer" settles a layer at once; one of scope "model" (global top-k) may
shrink earlier layers as later ones arrive, so survivors stay staged in the model's dtype until the last layer, and are
encoded then, once.

    H KV heads   S slots, stored then new   O stored slots   T new slots   D head dim   Q query heads   W window
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget.base import Budget
from kvfold.budget.choose import choose
from kvfold.evicted.base import Evicted, Split
from kvfold.pages.read import stored_slots
from kvfold.pages.sequence import LayerChange, SequenceCache
from kvfold.policy.size import Floor, SizeFacts, check_floor
from kvfold.policy.stage import Stage
from kvfold.score.base import QueryStats, View


@dataclass
class NewSlots:
    """The slots a pass adds to one layer of one sequence, at consecutive positions, and what was observed of them."""

    k_HTD: Tensor
    v_HTD: Tensor
    start: int  # position of the first
    mass_HS: Tensor | None = None  # attention mass of stored and new slots after this pass

    @property
    def num_tokens(self) -> int:
        return self.k_HTD.shape[1]

    @property
    def position_T(self) -> Tensor:
        return torch.arange(self.start, self.start + self.num_tokens, device=self.k_HTD.device)

    def all(self) -> LayerChange:
        """Everything stays."""
        num_heads = self.k_HTD.shape[0]
        position_N = self.position_T.repeat(num_heads)
        counts = [self.num_tokens] * num_heads
        return LayerChange(self.k_HTD.flatten(0, 1), self.v_HTD.flatten(0, 1), position_N, counts)


@dataclass
class _Staged:
    """Survivors of one layer so far: a mask over its slots, and the new ones among them as flat tensors."""

    score_HS: Tensor
    keep_HS: Tensor
    num_stored: list[int]
    change: LayerChange

    def trim(self, keep_HS: Tensor, evicted: Evicted) -> None:
        """Keep fewer: keep_HS is a subset of what is kept."""
        k, v, position, counts = [], [], [], []
        start = 0
        for head, count in enumerate(self.change.counts):
            mine = slice(start, start + count)
            start += count
            old = self.num_stored[head]
            stays = keep_HS[head, old:][self.keep_HS[head, old:]]
            split = Split(self.change.k_ND[mine], self.change.v_ND[mine], self.change.position_N[mine], stays)
            kept_k, kept_v = evicted.fold(split) if evicted.changes else (split.k_ND[stays], split.v_ND[stays])
            k.append(kept_k)
            v.append(kept_v)
            position.append(split.position_N[stays])
            counts.append(len(kept_k))
        keep = [keep_HS[head, :old].nonzero().squeeze(-1) for head, old in enumerate(self.num_stored)]
        dropped = any(len(index) < old for index, old in zip(keep, self.num_stored, strict=True))
        self.change = LayerChange(torch.cat(k), torch.cat(v), torch.cat(position), counts, keep if dropped else None)
        self.keep_HS = keep_HS


class Compression:
    """One round for one sequence. `layer` is called for every layer in order, then `finish` writes.

    `seen_len` is the committed length at the end of the current call: sizes such as 8x refer to it.
    """

    def __init__(self, sequence: SequenceCache, stage: Stage | None, seen_len: int) -> None:
        self.sequence = sequence
        self.stage = stage if stage is not None and stage.size is not None else None
        self.seen_len = seen_len
        self.changes: list[LayerChange] = []
        self.staged: list[_Staged] = []  # compressible layers only
        self._where: list[_Staged | None] = []
        self._kept_mass: list[Tensor | None] = []
        self.budget = self._budget() if self.stage is not None else None

    def _budget(self) -> Budget | None:
        """Slots per head that sealed slots may take, or None when the size cannot be exceeded."""
        assert self.stage is not None and self.stage.size is not None
        facts = size_facts(self.sequence, self.seen_len)
        target = self.stage.size.slots_per_head(facts)
        window = self.stage.score.needs.last_queries
        protect = self.stage.protect
        floor = Floor(protect.sinks, max(protect.recent, window), facts.open_len)
        check_floor(target, floor, self.stage.size, self.seen_len)
        if self.seen_len <= max(target, floor.slots):
            return None
        return Budget(target - facts.open_len, len(self.sequence.spec.compressible_layers), window)

    def layer(self, index: int, new: NewSlots) -> None:
        spec = self.sequence.spec.layers[index]
        if not spec.compressible:
            self._add(self._slide(index, new), None)
        elif self.budget is None:
            self._add(new.all(), None)
            self._kept_mass[-1] = new.mass_HS
        else:
            self._compress(index, new)

    def _add(self, change: LayerChange, staged: _Staged | None) -> None:
        self.changes.append(change)
        self._where.append(staged)
        self._kept_mass.append(None)

    def _compress(self, index: int, new: NewSlots) -> None:
        assert self.stage is not None and self.budget is not None
        view = build_view(self.sequence, index, new, self.stage, self.seen_len)
        score_HS = view.masked(self.stage.score.score(view))
        protected_HS = self.stage.protect.mask(view.position_RS, view.seen_R)
        for start, end in self.sequence.pinned:
            protected_HS |= (view.position_RS >= start) & (view.position_RS < end)
        score_HS = score_HS.masked_fill(protected_HS & view.valid_RS, torch.inf)
        staged = _Staged(score_HS, view.valid_RS, self.sequence.stored_lens(index), new.all())
        self.staged.append(staged)
        self._add(staged.change, staged)
        self._kept_mass[-1] = new.mass_HS
        allocator = self.stage.budget
        seen = self.staged if allocator.scope == "model" else [staged]
        counts = allocator.allocate([item.score_HS for item in seen], self.budget, len(self.staged) - 1)
        for item, count_H in zip(seen, counts, strict=True):
            keep_HS = choose(item.score_HS, count_H) & item.keep_HS
            if not torch.equal(keep_HS, item.keep_HS):
                item.trim(keep_HS, self.stage.evicted)

    def _slide(self, index: int, new: NewSlots) -> LayerChange:
        """A sliding-window layer keeps what the next query can see."""
        window = self.sequence.spec.layers[index].sliding_window
        assert window is not None
        change = new.all()
        oldest = self.seen_len - window + 1
        skipped = min(max(oldest - new.start, 0), new.num_tokens)
        if skipped:
            change = NewSlots(new.k_HTD[:, skipped:], new.v_HTD[:, skipped:], new.start + skipped).all()
        stored = self.sequence.stored_lens(index)
        gone = [max(0, min(length, oldest - (self.sequence.sealed_len - length))) for length in stored]
        if any(gone):
            device = new.k_HTD.device
            change.keep = [torch.arange(g, n, device=device) for g, n in zip(gone, stored, strict=True)]
        return change

    def finish(self, num_tokens: int, *, decoding: bool = False) -> bool:
        """Encode and write; True if anything was evicted from a compressible layer."""
        changes = [
            change if staged is None else staged.change
            for change, staged in zip(self.changes, self._where, strict=True)
        ]
        self.sequence.rewrite(changes, num_tokens, decoding=decoding)
        self._settle_mass()
        evicted = any(not torch.equal(item.keep_HS, item.score_HS > -torch.inf) for item in self.staged)
        if self.budget is not None:
            self.sequence.last_compressed_len = self.sequence.sealed_len
        return evicted

    def _settle_mass(self) -> None:
        """Carry the attention mass of survivors over, in their new row order."""
        for index, (mass_HS, staged) in enumerate(zip(self._kept_mass, self._where, strict=True)):
            if mass_HS is None:
                continue
            if staged is not None:
                rows = [mass[keep] for mass, keep in zip(mass_HS, staged.keep_HS, strict=True)]
                mass_HS = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            self.sequence.sidecar.layers[index].mass_HS = mass_HS


def size_facts(sequence: SequenceCache, seen_len: int) -> SizeFacts:
    """What a size expression refers to, for one sequence at a committed length."""
    spec = sequence.spec
    layers = [(i, spec.layers[i]) for i in spec.compressible_layers]
    num_heads = sum(layer.num_kv_heads for _, layer in layers)
    classes = [(sequence.page_class(i), layer.num_kv_heads) for i, layer in layers]
    slot_bytes = sum(page_class.bytes_per_slot * heads for page_class, heads in classes)
    padding = sum(page_class.bytes_per_page * heads for page_class, heads in classes)
    return SizeFacts(
        num_tokens=seen_len,
        num_heads=num_heads,
        bytes_per_slot=slot_bytes / max(num_heads, 1),
        overhead_bytes=sequence.open.num_bytes
        + sum(side.mass_HS.nbytes for side in sequence.sidecar.layers if side.mass_HS is not None)
        + padding
        + sequence.arena.superblock_bytes
        + 24 * num_heads,
        open_len=sequence.config.open_len,
        full_bytes=sum(seen_len * layer.num_kv_heads * layer.head_dim * 4 for _, layer in layers),
    )


def build_view(sequence: SequenceCache, index: int, new: NewSlots, stage: Stage, seen_len: int) -> View:
    """Stored and new slots of one layer side by side, with exactly what the scorer needs."""
    spec = sequence.spec.layers[index]
    stored = stored_slots(sequence, index, new.k_HTD.dtype)
    num_heads = spec.num_kv_heads
    device = new.k_HTD.device
    if not any(stored.lens):
        k, v = new.k_HTD, new.v_HTD
        position = new.position_T.expand(num_heads, -1)
        valid = torch.ones_like(position, dtype=torch.bool)
    else:
        lens = [length + new.num_tokens for length in stored.lens]
        shape = (num_heads, max(lens), spec.head_dim)
        k, v = new.k_HTD.new_zeros(shape), new.v_HTD.new_zeros(shape)
        position = torch.zeros(shape[:2], dtype=torch.int64, device=device)
        for head, old in enumerate(stored.lens):
            k[head, :old], v[head, :old] = stored.k[head], stored.v[head]
            k[head, old : lens[head]], v[head, old : lens[head]] = new.k_HTD[head], new.v_HTD[head]
            position[head, :old], position[head, old : lens[head]] = stored.position[head], new.position_T
        valid = torch.arange(shape[1], device=device) < torch.tensor(lens, device=device).unsqueeze(-1)
    view = View(
        layer=index,
        num_layers=sequence.spec.num_layers,
        spec=spec,
        num_heads=num_heads,
        k_RSD=k,
        v_RSD=v,
        position_RS=position,
        valid_RS=valid,
        seen_R=torch.full((num_heads,), new.start + new.num_tokens, device=device),
    )
    _observe(view, sequence, index, new, stage)
    return view


def _observe(view: View, sequence: SequenceCache, index: int, new: NewSlots, stage: Stage) -> None:
    needs, side = stage.score.needs, sequence.sidecar.layers[index]
    group = view.spec.group
    end = new.start + new.num_tokens
    if needs.last_queries:
        q_QWD = side.last_q_QWD
        assert q_QWD is not None
        window = min(needs.last_queries, q_QWD.shape[1])
        view.q_RGWD = q_QWD[:, -window:].unflatten(0, (view.num_heads, group))
        positions = torch.arange(end - window, end, device=q_QWD.device)
        view.q_position_RW = positions.expand(view.num_heads, -1)
    if needs.mass:
        view.mass_RS = new.mass_HS
        view.mass_count_RS = (end - view.position_RS).clamp(min=1).float() * group
    if needs.query_stats:
        moments = side.moments
        assert moments is not None
        mean_QD = moments.sum_QD / max(moments.count, 1)
        cov_QDD = moments.outer_QDD / max(moments.count, 1) - mean_QD.unsqueeze(-1) * mean_QD.unsqueeze(-2)
        view.stats = QueryStats(
            mean_QD.unflatten(0, (view.num_heads, group)), cov_QDD.unflatten(0, (view.num_heads, group))
        )
