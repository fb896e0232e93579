"""`tree`: neighbours compete pairwise, so that slots thin out smoothly with age (TreeKV, arXiv:2501.04987).

A pointer walks through the cache; whenever a token is added to a full cache, the less attended one of the two slots at
the pointer goes. With n slots and no change of length, one walk from end to end meets disjoint pairs of the n stored
and n new slots, and leaves half of them: so a prompt is thinned walk by walk, not token by token.

    cache   a b c d | e f g h arrive       ->  (a|b) (c|d) (e|f) (g|h)

    R rows   S slots   N slots of the cache, 2N with those that arrive
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.errors import PolicyError
from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View, given


@register(
    "score", "tree", paper="arXiv:2501.04987", cost="L²·d, L memory",
    published="differs: rebuilt from the text; pairs are judged in the end, not at the time of their duel",
)  # fmt: skip
@dataclass(frozen=True)
class Tree(Scorer):
    """Thin out the past pair by pair, the older the thinner, by the mean attention each slot has received.

    The first `sinks` positions are +inf; of the n slots that a head keeps, the last `recent` * n are latest slots, and
    the others a cache through which all older slots pass as above: of slots 2i and 2i + 1 the one of smaller mean
    attention goes (of equals the later). score = the walk in which a slot went + its mean attention; what never went
    scores higher, the latest slots highest.

    Reconstructed from the paper's text, whose code could not be had: half of the budget is recent, 4 sinks, as in its
    1K cache; attention is per KV head, summed over the group. Its prefill moves blocks, here single slots move. A pair
    is judged by the mean attention both have received in the end, from queries after the moment of their duel too,
    where a cache that evicts as it reads knows only those before: not causal, and kinder to what matters late. Each
    eviction starts a new walk at the first slot. Positions by slot, its choice, are the term `slot`.
    """

    sinks: int = 4
    recent: float = 0.5
    least = (("sinks", 0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.recent < 1:
            raise PolicyError(
                f"tree(recent={self.recent}): recent is a share of the budget, at least 0 and less than 1"
            )

    @property
    def needs(self) -> Needs:
        return Needs(sinks=self.sinks, mass=True, size=True)

    def score(self, view: View) -> Tensor:
        mass_RS = given("tree", view.mass_RS, "mass_RS")
        mean_RS = mass_RS / given("tree", view.mass_count_RS, "mass_count_RS").clamp(min=1)
        recent_len = int(self.recent * view.slots_per_head)
        is_sink_RS = (view.position_RS < self.sinks) & view.valid_RS
        slot_RS = torch.arange(mean_RS.shape[1], device=mean_RS.device).expand_as(mean_RS)
        is_recent_RS = slot_RS >= view.len_R.unsqueeze(-1) - recent_len
        in_tree_RS = view.valid_RS & ~is_sink_RS & ~is_recent_RS
        walk_RS = thinned(mean_RS, in_tree_RS, max(1, view.slots_per_head - self.sinks - recent_len))
        # Walks are fewer than slots, so a recent slot's own number, after those before it, is beyond all of them.
        score_RS = torch.where(is_recent_RS, view.len_R.unsqueeze(-1) + slot_RS, walk_RS + mean_RS.clamp(max=0.999))
        return view.masked(score_RS.masked_fill(is_sink_RS, torch.inf))


def thinned(mean_RS: Tensor, in_tree_RS: Tensor, capacity: int) -> Tensor:
    """The walk in which each slot of the tree goes, counted from 1; for those that stay, one more than the last."""
    num_slots, len_R1 = mean_RS.shape[1], in_tree_RS.sum(-1, keepdim=True)
    num_walks = max(0, -(-num_slots // capacity) - 1)
    walk_RS = ((len_R1 - 1).clamp(min=0) // capacity + 1).to(mean_RS.dtype).expand_as(mean_RS)
    # Slots of the tree in order; the index num_slots, a column of its own, stands for none.
    order_RS = torch.where(in_tree_RS, 0, 1).argsort(dim=-1, stable=True)
    place_S = torch.arange(num_slots, device=mean_RS.device)
    order_RS = order_RS.masked_fill(place_S >= len_R1, num_slots)
    order_RS = functional.pad(order_RS, (0, (num_walks + 1) * capacity - num_slots), value=num_slots)
    mean_RS, walk_RS = (functional.pad(x, (0, 1)) for x in (mean_RS, walk_RS))
    cache_RN = order_RS[:, :capacity]
    for walk in range(1, num_walks + 1):
        arriving_RN = order_RS[:, walk * capacity : (walk + 1) * capacity]
        cache_RN, gone_RN = _walk(torch.cat((cache_RN, arriving_RN), 1), (arriving_RN < num_slots).sum(-1), mean_RS)
        walk_RS = walk_RS.scatter(1, gone_RN, float(walk))
    return walk_RS[:, :num_slots]


def _walk(slot_RX: Tensor, num_pairs_R: Tensor, mean_RS: Tensor) -> tuple[Tensor, Tensor]:
    """Of N pairs the slots that stay, in order, and those that go, none behind the first `num_pairs`.

    A row with fewer pairs has seen all its slots: what it takes to be its cache is not asked for again.
    """
    none = mean_RS.shape[1] - 1
    first_RN, second_RN = slot_RX[:, 0::2], slot_RX[:, 1::2]
    first_wins_RN = mean_RS.gather(1, first_RN) >= mean_RS.gather(1, second_RN)
    is_pair_RN = torch.arange(first_RN.shape[1], device=slot_RX.device) < num_pairs_R.unsqueeze(-1)
    loser_RN = torch.where(first_wins_RN, second_RN, first_RN)
    return torch.where(first_wins_RN, first_RN, second_RN), torch.where(is_pair_RN, loser_RN, none)
