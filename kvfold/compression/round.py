"""One round of KV-cache compression: score the slots of every layer, allocate the budget, select, evict and encode.

Layers come in order. With an allocator of scope "layer" the selection of a layer is final; with one of scope "model"
(global top-k) later layers may shrink earlier ones, so selected slots stay in the model's dtype until the last layer
and are encoded then, once. They are selected anew whenever twice as many are held as the budget allows, and at the end.

    H KV heads   S slots of a head, stored then new
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor

from kvfold.budget.base import Budget, Scores
from kvfold.budget.shares import within_cost
from kvfold.budget.uniform import Uniform
from kvfold.compression.offload import HeadSlots, evicted_slots, offload
from kvfold.compression.selection import PendingSelection, RoundLayer, Selection, refitted
from kvfold.compression.view import NewSlots, build_view, size_facts, slot_costs, slots_cost
from kvfold.evicted.fit import targets_of
from kvfold.pages.async_copy import Download
from kvfold.pages.compaction import PageRewrite
from kvfold.pages.layer import LayerChange
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.parts import Stage
from kvfold.policy.size import Floor, Size, check_floor
from kvfold.protect import Protect
from kvfold.score.base import Needs, Replay, Scorer, View, check_scored, unscored
from kvfold.score.chunk import Reuse
from kvfold.yielding import yield_point


class CompressionRound:
    """One round for one sequence. `select` and `evict` are called for every layer in order, then `finish` writes.

    `select` only queues work for a device, `evict` waits for the counts: work queued between the two hides the wait.
    `seen_len` is the committed length at the end of the current call: sizes such as 8x refer to it. Below the
    protected slots a relative size leaves a prompt whole, and an absolute one is refused when a call starts; while
    `decoding` the protected slots are the size then.
    """

    def __init__(self, sequence: SequenceCache, stage: Stage | None, seen_len: int, *, decoding: bool = False) -> None:
        self.sequence = sequence
        self.stage = stage if stage is not None and stage.size is not None else None
        self.seen_len = seen_len
        self.decoding = decoding
        self._layers: list[RoundLayer] = []
        self._pending: PendingSelection | None = None
        self._unscored: list[tuple[int, Download]] = []  # by layer
        self._joined: Callable[[], LayerChange] | None = None  # waits for the last `select_joined`
        self._reuse = Reuse(self.stage.score) if self.stage is not None else None
        self.budget = self._budget(self.stage) if self.stage is not None else None

    def _budget(self, stage: Stage) -> Budget | None:
        """Sealed slots per head, or None if nothing has to be evicted."""
        target, floor = _target(self.sequence, stage, self.seen_len)
        if self.decoding:
            target = max(target, floor.slots)
        elif _size(stage).is_absolute:
            check_floor(target, floor, _size(stage), self.seen_len)
        elif target < floor.slots:
            return None
        has_room = self.seen_len <= target
        if self.seen_len <= floor.slots or (has_room and not stage.budget.may_leave):
            return None
        num_layers = len(self.sequence.spec.compressible_layers)
        return Budget(_sealed_slots(target, floor, self.seen_len), num_layers, self.seen_len)

    @property
    def replay(self) -> Replay | None:
        """The replay (second reading of the prompt) that has to come before `finish`, if anything is evicted."""
        if self.stage is None or self.budget is None:
            return None
        scored, fitted = self.stage.score.needs.replay, self.stage.evicted.needs.replay
        if scored is None or fitted is None:
            return scored or fitted
        return replace(scored, queries=fitted.queries, study=fitted.study)

    @property
    def selects_after_replay(self) -> bool:
        """Whether scores need the replay, so that no layer is selected before it."""
        return self.replay is not None and self.stage is not None and self.stage.score.needs.replay is not None

    def add_layer(self, index: int, new: NewSlots) -> None:
        """Select and evict at once."""
        self.select(index, new)
        self.evict()

    def select(self, index: int, new: NewSlots) -> None:
        """Score the slots of a layer, allocate and select."""
        if not self.sequence.spec.layers[index].compressible:
            self._layers.append(RoundLayer(self._slide_window(index, new)))
        elif self.budget is None:
            self._layers.append(RoundLayer(new.whole, new.mass_HS))
        else:
            self._compress(index, new, self.budget)
            if self.stage is not None and self.stage.evicted.needs.last_queries:
                self._record_targets(index, new)

    @cached_property
    def joins_with(self) -> tuple[Scorer, Protect, tuple[tuple[int, int], ...]] | None:
        """Scorer, protection and pinned spans: rounds of empty sequences with the same ones can select the slots of a
        layer in one go (joined.py). None: this one selects alone."""
        stage, budget = self.stage, self.budget
        if stage is None or budget is None or not isinstance(stage.budget, Uniform):
            return None
        evicted, score = stage.evicted, stage.score
        changes_slots = evicted.folds or evicted.has_bias or evicted.recall is not None or evicted.needs != Needs()
        observes = not score.needs.slots_alone or self.sequence.policy.observes_mass
        if changes_slots or observes or score.reuse_layers > 1:
            return None
        return score, stage.protect.at(budget.slots_per_head), tuple(self.sequence.pinned)

    def select_joined(self, change: Callable[[], LayerChange]) -> None:
        """In place of `select`; `change` is called by `evict`."""
        self._joined = change

    def evict(self) -> None:
        """Drop the slots that the last `select` did not keep."""
        if self._joined is not None:
            self._layers.append(RoundLayer(self._joined()))
            self._joined = None
        if self.stage is None or self._pending is None:
            return
        self._pending.apply()
        self._pending = None
        last = self._layers[-1]
        if self.stage.budget.scope == "layer" and last.selection is not None and last.mass_HS is None:
            # Scores and masks of a long prompt are large.
            self._layers[-1] = RoundLayer(last.selection.change, targets=last.targets)

    def select_after_replay(self, index: int, new: NewSlots) -> None:
        """After the replay: select, if scores needed it, and record its calibration targets."""
        if self.selects_after_replay:
            self.add_layer(index, new)
        if new.targets is not None:
            self._layers[index].targets = new.targets

    def _compress(self, index: int, new: NewSlots, budget: Budget) -> None:
        assert self.stage is not None
        place = self.sequence.spec.compressible_layers.index(index)
        scores = self._scores(index, place, new, self.stage, budget)
        weights = self._weights(index, new, self.stage, scores)
        added = Selection(scores, self.sequence.stored_lens(index), new.whole, weights)
        self._layers.append(RoundLayer(added.change, new.mass_HS, added))
        allocator = self.stage.budget
        selections = [layer.selection for layer in self._layers if layer.selection is not None]
        if allocator.scope == "model" and _can_defer(selections, budget):
            return
        competing = selections if allocator.scope == "model" else [added]
        self._pending = PendingSelection(competing, self._counts(competing, budget, place), self.stage.evicted)

    def _counts(self, layers: Sequence[Selection], budget: Budget, place: int) -> list[Tensor]:
        """Slots kept by each head of these layers."""
        assert self.stage is not None
        weights, allocator = [item.weights for item in layers], self.stage.budget

        def allocate(slots_per_head: int) -> list[Tensor]:
            return allocator.allocate(weights, replace(budget, slots_per_head=slots_per_head), place)

        # Bytes are compared once all competing layers are there.
        is_whole = allocator.scope == "layer" or len(layers) == budget.num_layers
        if allocator.slopes or not is_whole or not _size(self.stage).counts_bytes:
            return allocate(budget.slots_per_head)
        first = 0 if allocator.scope == "model" else place
        costs = slot_costs(self.sequence)[first : place + 1]
        if not self.sequence.policy.observes_mass and len(set(costs)) == 1:
            return allocate(budget.slots_per_head)
        return within_cost(allocate, budget.slots_per_head, partial(slots_cost, self.sequence, costs))

    def _scores(self, index: int, place: int, new: NewSlots, stage: Stage, budget: Budget) -> Scores:
        """Scores, +inf for protected slots; computed once for all policies that share scorer and protection."""
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
        protected_HS = protected_mask(self.sequence, protect, view)
        assert self._reuse is not None
        if plain not in new.scored:
            view.protected_RS = protected_HS if needs.protected else None
            new.scored[plain] = Scores(self._reuse.score(view, place))
            self._check_later(view, new.scored[plain].score_HS)
        score_HS = new.scored[plain].score_HS.masked_fill(protected_HS & view.valid_RS, torch.inf)
        return new.scored.setdefault(marked, Scores(score_HS))

    def _check_later(self, view: View, score_HS: Tensor) -> None:
        """On a GPU, tell the host of NaN among a prompt's scores once it waits for the counts of slots anyway."""
        if score_HS.is_cuda and not self.decoding:
            self._unscored.append((view.layer, Download(unscored(score_HS, view))))

    def _weights(self, index: int, new: NewSlots, stage: Stage, scores: Scores) -> Scores:
        """What the allocator compares: scores, or its own weights."""
        if not stage.budget.last_queries:
            return scores
        needs = Needs(last_queries=stage.budget.last_queries)
        return Scores(stage.budget.weigh(scores.score_HS, build_view(self.sequence, index, new, needs)))

    def _record_targets(self, index: int, new: NewSlots) -> None:
        """Record the outputs of a layer's heads to the last queries over the full cache."""
        assert self.stage is not None
        needs = Needs(last_queries=self.stage.evicted.needs.last_queries)
        view = build_view(self.sequence, index, new, needs)
        assert view.q_RGWD is not None and view.q_position_RW is not None
        self._layers[index].targets = targets_of(view, view.q_RGWD, view.q_position_RW[0])

    def _slide_window(self, index: int, new: NewSlots) -> LayerChange:
        """A sliding-window layer keeps the slots that the next token can see."""
        window = self.sequence.spec.layers[index].sliding_window
        assert window is not None
        oldest = new.end - window + 1
        stored_len = self.sequence.stored_lens(index)[0]  # heads of such a layer never differ
        num_dropped = min(stored_len, max(0, stored_len - (new.start - oldest)))
        return replace(new.since(oldest).whole, drop_first=num_dropped)

    def finish(self, num_tokens: int) -> None:
        """Encode and write; OutOfPages leaves the sequence as it was."""
        finish_all([(self, num_tokens)])

    def changes(self) -> list[LayerChange]:
        """The change of each layer; call once."""
        for layer, found in self._unscored:
            assert self.stage is not None
            check_scored(self.stage.score, layer, bool(found.wait()))
        return [self._final_change(index, layer) for index, layer in enumerate(self._layers)]

    def _final_change(self, index: int, layer: RoundLayer) -> LayerChange:
        """The change to write for a layer, refitted if the policy fits."""
        yield_point()
        change = layer.change if layer.selection is None else layer.selection.change
        if layer.targets is None or self.stage is None:
            return change
        change = refitted(self.sequence, index, change, layer.targets, self.stage.evicted)
        layer.targets = None
        return change

    def keep_whole(self, change: LayerChange) -> None:
        """In place of `select`, where nothing has to be evicted: all new slots of the next layer."""
        self._layers.append(RoundLayer(change))

    def write(self, rewrite: PageRewrite, num_tokens: int) -> None:
        offloaded: dict[int, list[HeadSlots]] = {}  # evicted slots, by layer
        if self.stage is not None and self.stage.evicted.recall is not None:
            for i in self.sequence.spec.compressible_layers:
                offloaded[i] = evicted_slots(self.sequence, i, rewrite.changes[i])
        rewrite.write(num_tokens)
        for index, heads in offloaded.items():
            offload(self.sequence, index, heads)
        for state, layer in zip(self.sequence.observed.layers, self._layers, strict=True):
            if layer.mass_HS is not None:
                state.mass_HS = layer.kept_mass_HS
        self.written()

    def written(self) -> None:
        """The kept slots are in their pages."""
        if self.budget is not None:
            self.sequence.last_compressed_len = self.sequence.sealed_len

    @property
    def only_writes(self) -> bool:
        """Whether nothing is offloaded or observed, so that writing the kept slots is all there is."""
        offloads = self.stage is not None and self.stage.evicted.recall is not None
        return not offloads and all(layer.mass_HS is None for layer in self._layers)


def finish_all(rounds: Sequence[tuple[CompressionRound, int]], release: Callable[[], None] = lambda: None) -> None:
    """Write rounds, each with the tokens it seals; OutOfPages leaves every sequence as it was. `release` frees pages
    that these rounds take."""
    changes = [compression.changes() for compression, _ in rounds]
    release()
    found: list[PageRewrite] = []
    try:
        for (compression, _), mine in zip(rounds, changes, strict=True):
            found.append(PageRewrite(compression.sequence, mine, decoding=compression.decoding))
    except BaseException:
        for rewrite in found:
            rewrite.cancel()
        raise
    joined = []
    for (compression, num_tokens), rewrite in zip(rounds, found, strict=True):
        if len(rounds) > 1 and compression.only_writes and rewrite.can_join:
            joined.append((compression, rewrite, num_tokens))
        else:
            compression.write(rewrite, num_tokens)
    if joined:
        PageRewrite.write_joined([(rewrite, num_tokens) for _, rewrite, num_tokens in joined])
    for compression, _, _ in joined:
        compression.written()


def _can_defer(selections: Sequence[Selection], budget: Budget) -> bool:
    """Whether selecting can wait for more layers: every selection sorts all slots held."""
    num_slots = sum(sum(layer.change.counts) for layer in selections)
    most = 2 * budget.num_layers * budget.slots_per_head * len(selections[0].change.counts)
    return len(selections) < budget.num_layers and num_slots <= most


def check_size(sequence: SequenceCache, num_tokens: int) -> None:
    """SizeError where a prompt of this length would not have the prefill stage's size: a relative size below the
    protected slots would leave it whole."""
    stage = sequence.policy.prefill
    if stage.size is not None:
        check_floor(*_target(sequence, stage, num_tokens), stage.size, num_tokens)


def decode_target(sequence: SequenceCache) -> int:
    """Slots per head that the decode stage's size allows now; it must have a size."""
    target, floor = _target(sequence, sequence.policy.decode, sequence.committed_len)
    return max(target, floor.slots)


def check_decode_size(sequence: SequenceCache, seen_len: int) -> None:
    """Refuse an absolute size that decoding could not hold, before the prompt is read."""
    stage = sequence.policy.decode
    if stage.size is not None and stage.size.is_absolute:
        check_floor(*_target(sequence, stage, seen_len), stage.size, seen_len)


def _target(sequence: SequenceCache, stage: Stage, seen_len: int) -> tuple[int, Floor]:
    """Slots per head that the size allows on average, and the protected ones that must fit into every head."""
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


def protected_mask(sequence: SequenceCache, protect: Protect, view: View) -> Tensor:
    """bool [R, S]: protected and pinned slots."""
    protected_RS = protect.mask(view.position_RS, view.seen_R)
    for start, end in sequence.pinned:
        protected_RS = protected_RS | ((view.position_RS >= start) & (view.position_RS < end))
    return protected_RS


def _sealed_slots(target: int, floor: Floor, seen_len: int) -> int:
    """What a size leaves beside the open block, or everything where there is room for it."""
    return seen_len if seen_len <= target else max(0, target - floor.open_len)


def _size(stage: Stage) -> Size:
    assert stage.size is not None
    return stage.size
