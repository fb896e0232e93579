"""One round of compression: score the slots of every layer, share out the budget, choose, and write what stays.

Layers arrive in order. An allocator of scope "layer" settles a layer at once; one of scope "model" (global top-k) may
shrink earlier layers as later ones arrive, so survivors stay staged in the model's dtype until the last layer, and are
encoded then, once.

    H KV heads   S slots of a head, stored then new   N new slots, head after head   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvfold.budget.base import Budget
from kvfold.budget.choose import choose
from kvfold.evicted.base import Evicted, Split
from kvfold.pages.sequence import LayerChange, SequenceCache
from kvfold.pages.view import NewSlots, build_view, size_facts
from kvfold.policy.size import Floor, check_floor
from kvfold.policy.stage import Stage

__all__ = ["Compression", "NewSlots"]


@dataclass
class _Staged:
    """Survivors of one layer so far: a mask over its slots, and the new ones among them as flat tensors."""

    score_HS: Tensor
    keep_HS: Tensor
    num_stored: list[int]
    change: LayerChange

    def __post_init__(self) -> None:
        slot_S = torch.arange(self.score_HS.shape[1], device=self.score_HS.device)
        self.is_new_HS = slot_S >= torch.tensor(self.num_stored, device=self.score_HS.device).unsqueeze(-1)

    def trim(self, keep_HS: Tensor, evicted: Evicted) -> None:
        """Keep fewer: keep_HS is a subset of what is kept."""
        stays_N = keep_HS[self.keep_HS & self.is_new_HS]  # row-major, so head after head as in the change
        k_ND, v_ND = self._folded(stays_N, evicted)
        counts = (keep_HS & self.is_new_HS).sum(-1).tolist()
        self.change = LayerChange(k_ND, v_ND, self.change.position_N[stays_N], counts, self._stored(keep_HS))
        self.keep_HS = keep_HS

    def _folded(self, stays_N: Tensor, evicted: Evicted) -> tuple[Tensor, Tensor]:
        change = self.change
        if not evicted.changes:
            return change.k_ND[stays_N], change.v_ND[stays_N]
        columns = (change.k_ND, change.v_ND, change.position_N, stays_N)
        heads = zip(*(column.split(change.counts) for column in columns), strict=True)
        folded = [evicted.fold(Split(*head)) for head in heads]
        return torch.cat([k for k, _ in folded]), torch.cat([v for _, v in folded])

    def _stored(self, keep_HS: Tensor) -> list[Tensor] | None:
        """Indices of the stored slots that stay, per head; None: all of them."""
        keep_HS = keep_HS & ~self.is_new_HS
        counts = keep_HS.sum(-1).tolist()
        return None if counts == self.num_stored else list(keep_HS.nonzero()[:, 1].split(counts))


@dataclass
class _Layer:
    """One layer of the round: `staged` where slots compete; the attention mass of all its slots, if it is counted."""

    change: LayerChange
    mass_HS: Tensor | None = None
    staged: _Staged | None = None

    @property
    def settled_mass_HS(self) -> Tensor | None:
        """The mass of survivors, in their new row order."""
        if self.mass_HS is None or self.staged is None:
            return self.mass_HS
        rows = [mass_S[keep_S] for mass_S, keep_S in zip(self.mass_HS, self.staged.keep_HS, strict=True)]
        return pad_sequence(rows, batch_first=True)


class Compression:
    """One round for one sequence. `layer` is called for every layer in order, then `finish` writes.

    `seen_len` is the committed length at the end of the current call: sizes such as 8x refer to it.
    """

    def __init__(self, sequence: SequenceCache, stage: Stage | None, seen_len: int) -> None:
        self.sequence = sequence
        self.stage = stage if stage is not None and stage.size is not None else None
        self.seen_len = seen_len
        self._layers: list[_Layer] = []
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
        if not self.sequence.spec.layers[index].compressible:
            self._layers.append(_Layer(self._slide(index, new)))
        elif self.budget is None:
            self._layers.append(_Layer(new.all(), new.mass_HS))
        else:
            self._compress(index, new, self.budget)

    def _compress(self, index: int, new: NewSlots, budget: Budget) -> None:
        assert self.stage is not None
        score_HS, valid_HS = self._scores(index, new, self.stage)
        added = _Staged(score_HS, valid_HS, self.sequence.stored_lens(index), new.all())
        self._layers.append(_Layer(added.change, new.mass_HS, added))
        allocator = self.stage.budget
        staged = [layer.staged for layer in self._layers if layer.staged is not None]
        competing = staged if allocator.scope == "model" else [added]
        counts = allocator.allocate([item.score_HS for item in competing], budget, len(staged) - 1)
        for item, count_H in zip(competing, counts, strict=True):
            keep_HS = choose(item.score_HS, count_H) & item.keep_HS
            if not torch.equal(keep_HS, item.keep_HS):
                item.trim(keep_HS, self.stage.evicted)

    def _scores(self, index: int, new: NewSlots, stage: Stage) -> tuple[Tensor, Tensor]:
        """Scores (-inf: no slot, +inf: must stay) and which slots exist."""
        view = build_view(self.sequence, index, new, stage.score.needs)
        must_stay_HS = stage.protect.mask(view.position_RS, view.seen_R)
        for start, end in self.sequence.pinned:
            must_stay_HS = must_stay_HS | ((view.position_RS >= start) & (view.position_RS < end))
        score_HS = view.masked(stage.score.score(view))
        return score_HS.masked_fill(must_stay_HS & view.valid_RS, torch.inf), view.valid_RS

    def _slide(self, index: int, new: NewSlots) -> LayerChange:
        """A sliding-window layer keeps what the token after the new ones can see."""
        window = self.sequence.spec.layers[index].sliding_window
        assert window is not None
        oldest = new.end - window + 1
        change = new.since(oldest).all()
        stored_len = self.sequence.stored_lens(index)[0]  # heads of such a layer never differ
        change.drop_first = min(stored_len, max(0, stored_len - (new.start - oldest)))
        return change

    def finish(self, num_tokens: int, *, decoding: bool = False) -> None:
        """Encode and write."""
        changes = [layer.change if layer.staged is None else layer.staged.change for layer in self._layers]
        self.sequence.rewrite(changes, num_tokens, decoding=decoding)
        for side, layer in zip(self.sequence.sidecar.layers, self._layers, strict=True):
            if layer.mass_HS is not None:
                side.mass_HS = layer.settled_mass_HS
        if self.budget is not None:
            self.sequence.last_compressed_len = self.sequence.sealed_len
