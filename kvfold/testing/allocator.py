"""The contract of an allocator (kvfold/budget/base.py).

H heads   S slots
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.budget.base import Allocator, Budget, Scores
from kvfold.score.base import Needs
from kvfold.testing.rules import attempt, require, require_docstring, require_term
from kvfold.testing.views import HEADS, make_view

VALUES = (0.0, 0.25, 0.25, 0.5, 1.0, -1.0, torch.inf, -torch.inf)  # few, so that ties abound
_NUM_DRAWN = 60


def check_allocator(allocator: Allocator) -> None:
    """AssertionError, with the rule as its text, if an allocator breaks its contract."""
    require_term(allocator, Allocator)
    _a_layer_without_slots_keeps_none(allocator)
    _a_budget_beyond_all_slots_keeps_all(allocator)
    for scores, slots in _drawn():
        counts_lie_between_protected_and_existing(allocator, scores, slots)
        the_total_is_the_budget(allocator, scores, slots)
        earlier_layers_only_shrink(allocator, scores, slots)
    _padding_changes_nothing(allocator)
    _weights_keep_the_bounds(allocator)
    require_docstring(allocator)


def _drawn() -> Iterator[tuple[list[Tensor], int]]:
    """Layers of one model, with equally many heads, and slots per head; the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def draw(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    for _ in range(_NUM_DRAWN):
        num_heads, num_layers = draw(1, 3), draw(1, 4)
        shapes = [(num_heads, draw(1, 8)) for _ in range(num_layers)]
        values = torch.tensor(VALUES)
        yield [values[torch.randint(len(VALUES), shape, generator=generator)] for shape in shapes], draw(0, 9)


def allocate_all(allocator: Allocator, scores: Sequence[Tensor], budget: Budget) -> list[Tensor]:
    """Counts of all layers, by scope: layer by layer, or all at once."""
    if allocator.scope == "model":
        return _allocate(allocator, scores, budget, len(scores) - 1)
    return [_allocate(allocator, [score_HS], budget, layer)[0] for layer, score_HS in enumerate(scores)]


def _allocate(allocator: Allocator, scores: Sequence[Tensor], budget: Budget, layer: int) -> list[Tensor]:
    rule = f"allocate must take {budget.slots_per_head} slots a head for {len(scores)} layers"
    given = [Scores(score_HS) for score_HS in scores]
    counts = attempt(allocator.allocate, given, budget, layer, rule=rule)
    shapes, wanted = [list(count_H.shape) for count_H in counts], [[len(score_HS)] for score_HS in scores]
    require(shapes == wanted, f"allocate must return one count for each head of each layer: {wanted}, not {shapes}")
    require(all(count_H.dtype == torch.int64 for count_H in counts), "counts must be int64")
    return counts


def counts_lie_between_protected_and_existing(allocator: Allocator, scores: Sequence[Tensor], slots: int) -> None:
    counts = allocate_all(allocator, scores, Budget(slots, len(scores)))
    for score_HS, count_H in zip(scores, counts, strict=True):
        protected_H, existing_H = Scores(score_HS).bounds
        require((protected_H <= count_H).all(), "a head must keep all of its protected slots (score +inf)")
        require((count_H <= existing_H).all(), "a head must not keep more slots than exist (score above -inf)")


def the_total_is_the_budget(allocator: Allocator, scores: Sequence[Tensor], slots: int) -> None:
    if allocator.slopes:
        scores = scores[:1]  # a line over several layers has a total of its own
    counts = allocate_all(allocator, scores, Budget(slots, len(scores)))
    groups = [list(range(len(scores)))] if allocator.scope == "model" else [[layer] for layer in range(len(scores))]
    for layers in groups:
        size = slots * sum(scores[layer].shape[0] for layer in layers)
        protected = sum(int(Scores(scores[layer]).bounds.protected_H.sum()) for layer in layers)
        existing = sum(int(Scores(scores[layer]).bounds.existing_H.sum()) for layer in layers)
        kept, most = sum(int(counts[layer].sum()) for layer in layers), max(protected, min(size, existing))
        require(kept <= most, f"counts must not exceed the budget of {most} slots; they add up to {kept}")
        rule = f"counts must add up to the budget, {most} slots, not {kept}, unless may_leave is True"
        require(allocator.may_leave or kept == most, rule)


def earlier_layers_only_shrink(allocator: Allocator, scores: Sequence[Tensor], slots: int) -> None:
    """What lets the runner drop slots of lower layers while it reads the next."""
    if allocator.scope == "layer":
        return
    budget = Budget(slots, len(scores))
    history = [_allocate(allocator, scores[: layer + 1], budget, layer) for layer in range(len(scores))]
    for before, after in pairwise(history):
        shrink = all((now_H <= then_H).all() for then_H, now_H in zip(before, after, strict=False))
        require(shrink, 'with scope "model", counts of earlier layers may only shrink from call to call')


def _a_budget_beyond_all_slots_keeps_all(allocator: Allocator) -> None:
    scores = [torch.rand(2, 6, generator=torch.Generator().manual_seed(layer)) + 0.5 for layer in range(3)]
    counts = [count_H.tolist() for count_H in allocate_all(allocator, scores, Budget(100, 3))]
    require(counts == [[6, 6]] * 3, "a budget beyond all slots must keep all of them")


def _a_layer_without_slots_keeps_none(allocator: Allocator) -> None:
    counts = allocate_all(allocator, [torch.full((2, 3), -torch.inf)], Budget(2, 1))
    require(counts[0].tolist() == [0, 0], "a layer without slots (all scores -inf) must keep none")


def _padding_changes_nothing(allocator: Allocator) -> None:
    scores = [torch.rand(2, 10, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    padded = [functional.pad(score_HS, (0, 5), value=-torch.inf) for score_HS in scores]
    ours, theirs = (allocate_all(allocator, given, Budget(4, 3)) for given in (scores, padded))
    same = all(torch.equal(count_H, other_H) for count_H, other_H in zip(ours, theirs, strict=True))
    require(same, "padding (score -inf) must not change the counts")


def _weights_keep_the_bounds(allocator: Allocator) -> None:
    if not allocator.last_queries:
        return
    view = make_view((40,), (40,) * HEADS, Needs(last_queries=allocator.last_queries))
    score_HS = torch.rand(view.valid_RS.shape, generator=torch.Generator().manual_seed(0))
    score_HS[:, :3], score_HS[:, 5] = torch.inf, -torch.inf
    weight_HS = attempt(allocator.weigh, score_HS.clone(), view, rule="weigh must take the scores of a layer")
    same = all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(Scores(weight_HS).bounds, Scores(score_HS).bounds, strict=True)
    )
    require(same, "weigh must return as many -inf and +inf in each head as the scores have")
