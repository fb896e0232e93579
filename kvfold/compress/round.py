"""One round of compression: score the slots of every layer, share out the budget, choose, and write what stays.

Layers arrive in order. An allocator of scope "layer" settles a layer at once; one of scope "model" (global top-k) may
shrink earlier layers as later ones arrive, so survivors stay staged in the model's dtype until the last layer, and are
encoded then, once. They are chosen anew whenever twice as many are staged as may stay, and at the end.

    H KV heads   S slots of a head, stored then new
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kvfold.budget.bounds import Budget
from kvfold.budget.costs import within_cost
from kvfold.budget.scores import Scores
from kvfold.compress.offload import HeadSlots, evicted_slots, offload
from kvfold.compress.refit import refitted
from kvfold.compress.selection import PendingSelection, RoundLayer, Selection
from kvfold.compress.view import NewSlots, build_view, size_facts, slot_costs, slots_cost
from kvfold.evicted.calibration_targets import ask
from kvfold.pages.change import LayerChange
from kvfold.pages.compaction import PageRewrite
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.size import Floor, Size, check_floor
from kvfold.policy.stage import Stage
from kvfold.protect import Protect
from kvfold.score.base import Needs, Replay
from kvfold.score.reuse import Reuse
from kvfold.yielding import yield_point


class CompressionRound:
    """One round for one sequence. `look` and `settle` are called for every layer in order, then `finish` writes.

    `look` only queues work for a device, `settle` waits for its answer: what is queued between the two hides the wait.
    `seen_len` is the committed length at the end of the current call: sizes such as 8x refer to it. A size below what
    must stay is refused when a call starts; while `decoding`, what must stay is the size then.
    """

    def __init__(self, sequence: SequenceCache, stage: Stage | None, seen_len: int, *, decoding: bool = False) -> None:
        self.sequence = sequence
        self.stage = stage if stage is not None and stage.size is not None else None
        self.seen_len = seen_len
        self.decoding = decoding
        self._layers: list[RoundLayer] = []
        self._chosen: PendingSelection | None = None
        self._reuse = Reuse(self.stage.score) if self.stage is not None else None
        self.budget = self._budget(self.stage) if self.stage is not None else None

    def _budget(self, stage: Stage) -> Budget | None:
        """Slots per head that sealed slots may take, or None when the size cannot be exceeded."""
        target, floor = _target(self.sequence, stage, self.seen_len)
        if self.decoding:
            target = max(target, floor.slots)
        else:
            check_floor(target, floor, _size(stage), self.seen_len)
        has_room = self.seen_len <= target
        if self.seen_len <= floor.slots or (has_room and not stage.budget.may_leave):
            return None
        num_layers = len(self.sequence.spec.compressible_layers)
        return Budget(_sealed_slots(target, floor, self.seen_len), num_layers, self.seen_len)

    @property
    def replay(self) -> Replay | None:
        """The second reading that has to come before the end, if anything is going to be evicted."""
        if self.stage is None or self.budget is None:
            return None
        scored, fitted = self.stage.score.needs.replay, self.stage.evicted.needs.replay
        if scored is None or fitted is None:
            return scored or fitted
        return replace(scored, queries=fitted.queries, study=fitted.study)

    @property
    def looks_late(self) -> bool:
        """Whether the second reading has to come before the first look."""
        return self.replay is not None and self.stage is not None and self.stage.score.needs.replay is not None

    def layer(self, index: int, new: NewSlots) -> None:
        """Look at a layer and settle it at once."""
        self.look(index, new)
        self.settle()

    def look(self, index: int, new: NewSlots) -> None:
        """Score the slots of a layer, share out and choose."""
        if not self.sequence.spec.layers[index].compressible:
            self._layers.append(RoundLayer(self._slide(index, new)))
        elif self.budget is None:
            self._layers.append(RoundLayer(new.whole, new.mass_HS))
        else:
            self._compress(index, new, self.budget)
            if self.stage is not None and self.stage.evicted.needs.last_queries:
                self._ask(index, new)

    def settle(self) -> None:
        """Drop what the last look did not choose."""
        if self.stage is None or self._chosen is None:
            return
        self._chosen.settle()
        self._chosen = None
        last = self._layers[-1]
        if self.stage.budget.scope == "layer" and last.staged is not None and last.mass_HS is None:
            # Scores and masks of a long prompt are large.
            self._layers[-1] = RoundLayer(last.staged.change, asked=last.asked)

    def look_again(self, index: int, new: NewSlots) -> None:
        """A second reading has been: score the slots of a layer, if that waited for it, and note what it asked."""
        if self.looks_late:
            self.layer(index, new)
        if new.asked is not None:
            self._layers[index].asked = new.asked

    def _compress(self, index: int, new: NewSlots, budget: Budget) -> None:
        assert self.stage is not None
        place = self.sequence.spec.compressible_layers.index(index)
        scores = self._scores(index, place, new, self.stage, budget)
        weights = self._weights(index, new, self.stage, scores)
        added = Selection(scores, self.sequence.stored_lens(index), new.whole, weights)
        self._layers.append(RoundLayer(added.change, new.mass_HS, added))
        allocator = self.stage.budget
        staged = [layer.staged for layer in self._layers if layer.staged is not None]
        if allocator.scope == "model" and _can_wait(staged, budget):
            return
        competing = staged if allocator.scope == "model" else [added]
        self._chosen = PendingSelection(competing, self._counts(competing, budget, place), self.stage.evicted)

    def _counts(self, layers: Sequence[Selection], budget: Budget, place: int) -> list[Tensor]:
        """Slots that each head of these layers keeps."""
        assert self.stage is not None
        weights, allocator = [item.weights for item in layers], self.stage.budget

        def allocate(slots_per_head: int) -> list[Tensor]:
            return allocator.allocate(weights, replace(budget, slots_per_head=slots_per_head), place)

        # Of some of the layers that compete the bytes say nothing yet; all of them are there in the end.
        is_whole = allocator.scope == "layer" or len(layers) == budget.num_layers
        if allocator.slopes or not is_whole or not _size(self.stage).counts_bytes:
            return allocate(budget.slots_per_head)
        first = 0 if allocator.scope == "model" else place
        costs = slot_costs(self.sequence)[first : place + 1]
        if not self.sequence.policy.watches_mass and len(set(costs)) == 1:
            return allocate(budget.slots_per_head)
        return within_cost(allocate, budget.slots_per_head, partial(slots_cost, self.sequence, costs))

    def _scores(self, index: int, place: int, new: NewSlots, stage: Stage, budget: Budget) -> Scores:
        """Scores, also of what must stay, found once for all policies that agree on both."""
        needs = stage.score.needs
        slots_per_head = budget.slots_per_head if needs.size else 0
        protect = stage.protect.at(budget.slots_per_head)
        rules = (protect, *self.sequence.pinned)
        plain = (stage.score, slots_per_head, rules if needs.protected else None)
        marked = (stage.score, slots_per_head, rules, "marked")
        if marked in new.scored:
            return new.scored[marked]
        view = build_view(self.sequence, index, new, Needs() if plain in new.scored else needs)
        view.slots_per_head = slots_per_head
        must_stay_HS = protect.mask(view.position_RS, view.seen_R)
        for start, end in self.sequence.pinned:
            must_stay_HS = must_stay_HS | ((view.position_RS >= start) & (view.position_RS < end))
        assert self._reuse is not None
        if plain not in new.scored:
            view.protected_RS = must_stay_HS if needs.protected else None
            new.scored[plain] = Scores(self._reuse.score(view, place))
        score_HS = new.scored[plain].score_HS.masked_fill(must_stay_HS & view.valid_RS, torch.inf)
        return new.scored.setdefault(marked, Scores(score_HS))

    def _weights(self, index: int, new: NewSlots, stage: Stage, scores: Scores) -> Scores:
        """What the budget is shared out by."""
        if not stage.budget.last_queries:
            return scores
        needs = Needs(last_queries=stage.budget.last_queries)
        return Scores(stage.budget.weigh(scores.score_HS, build_view(self.sequence, index, new, needs)))

    def _ask(self, index: int, new: NewSlots) -> None:
        """Note what the heads of a layer answer to the last queries while everything is there."""
        assert self.stage is not None
        needs = Needs(last_queries=self.stage.evicted.needs.last_queries)
        view = build_view(self.sequence, index, new, needs)
        assert view.q_RGWD is not None and view.q_position_RW is not None
        self._layers[index].asked = ask(view, view.q_RGWD, view.q_position_RW[0])

    def _slide(self, index: int, new: NewSlots) -> LayerChange:
        """A sliding-window layer keeps what the token after the new ones can see."""
        window = self.sequence.spec.layers[index].sliding_window
        assert window is not None
        oldest = new.end - window + 1
        stored_len = self.sequence.stored_lens(index)[0]  # heads of such a layer never differ
        gone = min(stored_len, max(0, stored_len - (new.start - oldest)))
        return replace(new.since(oldest).whole, drop_first=gone)

    def finish(self, num_tokens: int) -> None:
        """Encode and write; OutOfPages leaves the sequence as it was."""
        finish_all([(self, num_tokens)])

    def changes(self) -> list[LayerChange]:
        """What is to be written, layer by layer; ask once."""
        return [self._settled(index, layer) for index, layer in enumerate(self._layers)]

    def prepare(self, changes: Sequence[LayerChange]) -> PageRewrite:
        """Find the memory for what stays."""
        return PageRewrite(self.sequence, changes, decoding=self.decoding)

    def _settled(self, index: int, layer: RoundLayer) -> LayerChange:
        """What is to be written of a layer."""
        yield_point()
        change = layer.change if layer.staged is None else layer.staged.change
        if layer.asked is None or self.stage is None:
            return change
        change = refitted(self.sequence, index, change, layer.asked, self.stage.evicted)
        layer.asked = None
        return change

    def write(self, rewrite: PageRewrite, num_tokens: int) -> None:
        going = self._going(rewrite.changes)
        rewrite.write(num_tokens)
        for index, heads in going.items():
            offload(self.sequence, index, heads)
        for side, layer in zip(self.sequence.observed.layers, self._layers, strict=True):
            if layer.mass_HS is not None:
                side.mass_HS = layer.settled_mass_HS
        if self.budget is not None:
            self.sequence.last_compressed_len = self.sequence.sealed_len

    def _going(self, changes: Sequence[LayerChange]) -> dict[int, list[HeadSlots]]:
        """What leaves for the host, by layer."""
        if self.stage is None or not self.stage.evicted.offloads:
            return {}
        return {i: evicted_slots(self.sequence, i, changes[i]) for i in self.sequence.spec.compressible_layers}


def finish_all(rounds: Sequence[tuple[CompressionRound, int]], release: Callable[[], None] = lambda: None) -> None:
    """Write rounds, each with the tokens it seals; OutOfPages leaves every sequence as it was. `release` gives back
    pages that others must not take before what is written has."""
    changes = [compression.changes() for compression, _ in rounds]
    release()
    found: list[PageRewrite] = []
    try:
        for (compression, _), mine in zip(rounds, changes, strict=True):
            found.append(compression.prepare(mine))
    except BaseException:
        for rewrite in found:
            rewrite.cancel()
        raise
    for (compression, num_tokens), rewrite in zip(rounds, found, strict=True):
        compression.write(rewrite, num_tokens)


def _can_wait(staged: Sequence[Selection], budget: Budget) -> bool:
    """Whether more layers come before slots have to go: each choice is among all of them."""
    num_slots = sum(sum(layer.change.counts) for layer in staged)
    most = 2 * budget.num_layers * budget.slots_per_head * len(staged[0].change.counts)
    return len(staged) < budget.num_layers and num_slots <= most


def decode_target(sequence: SequenceCache) -> int:
    """Slots per head that the decode stage holds now; it must have a size."""
    target, floor = _target(sequence, sequence.policy.decode, sequence.committed_len)
    return max(target, floor.slots)


def check_decode_size(sequence: SequenceCache, seen_len: int) -> None:
    """Refuse a bound that decoding could not hold, before anything is read; relative sizes grow with the sequence."""
    stage = sequence.policy.decode
    if stage.size is not None and stage.size.is_absolute:
        check_floor(*_target(sequence, stage, seen_len), stage.size, seen_len)


def _target(sequence: SequenceCache, stage: Stage, seen_len: int) -> tuple[int, Floor]:
    """Slots per head that the size allows on average, and those that must fit into every head."""
    facts, needs = size_facts(sequence, seen_len), stage.score.needs
    if stage.budget.slopes:  # a layer is settled before the next is there: all of its slots may be dear
        facts = replace(facts, bytes_per_slot=max(slot_costs(sequence), default=facts.bytes_per_slot))
    floor = stage.protect.floor(needs.window, facts.open_len, sinks=needs.sinks)
    return _size(stage).slots_per_head(facts), floor


def protected(sequence: SequenceCache, stage: Stage, seen_len: int) -> Protect:
    """What a stage protects at this length, as numbers; a share is of nothing where there is no size."""
    if stage.size is None:
        return stage.protect.at(0)
    return stage.protect.at(_sealed_slots(*_target(sequence, stage, seen_len), seen_len))


def _sealed_slots(target: int, floor: Floor, seen_len: int) -> int:
    """What a size leaves beside the open block, or everything where there is room for it."""
    return seen_len if seen_len <= target else max(0, target - floor.open_len)


def _size(stage: Stage) -> Size:
    assert stage.size is not None
    return stage.size
