"""`fastgen`: each head keeps the cheapest of several sets (special, frequent, local, full) that covers its attention
(FastGen, arXiv:2310.01801).

R rows   S slots   K kinds
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.budget.select import select_top
from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View, given, share


@register(
    "score", "fastgen", paper="arXiv:2310.01801", cost="L²·d, L memory",
    published="differs: no punctuation kind; size as published with `adaptive(loss=0.999, window=none)`",
)  # fmt: skip
@dataclass(frozen=True)
class FastGen(Scorer):
    """Tell by its attention what kind of set each head needs, and keep the slots of that set first.

    Kinds, each holding the one before: the first `sinks` positions; the `frequent` share of slots with most attention;
    the `local` share of latest slots; everything. A head's kind is the first whose slots received at least `recovery`
    of the attention mass the head gave in all (of what it still holds). score = 1 + the slot's share of that mass
    inside the head's set, that share alone outside. With `ada` or `global`, heads of the cheap kinds give their slots
    to the others, which is the method's point; with `uniform` the set only decides the order.

    In the paper the size is what the kinds come to: `fastgen + adaptive(loss=0.999, window=none) + protect(none)` keeps
    each head's set and no more. With a size of its own, the sets only come first. Against the paper: punctuation, a
    kind of its own there, needs the text and is absent, so heads that look at punctuation take a dearer kind; mass is
    of the whole group. Shares are the paper's, recovery lies in its range of 0.91 to 0.98. Kinds are told anew at every
    eviction, where the paper tells them once, at the end of the prompt.
    """

    sinks: int = 4
    frequent: float = 0.3
    local: float = 0.3
    recovery: float = 0.95
    least = (("sinks", 0),)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("frequent", "local", "recovery"):
            share("fastgen", name, getattr(self, name))

    @property
    def needs(self) -> Needs:
        return Needs(mass=True)

    def score(self, view: View) -> Tensor:
        mass_RS = given("fastgen", view.mass_RS, "mass_RS").masked_fill(~view.valid_RS, 0.0)
        share_RS = mass_RS / mass_RS.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        kinds_RKS = self._kinds(view, share_RS)
        held_RK = torch.where(kinds_RKS, share_RS.unsqueeze(1), 0.0).sum(-1)
        kind_R = (held_RK < self.recovery).sum(-1).clamp(max=kinds_RKS.shape[1] - 1)  # as sets grow, so do shares
        chosen_RS = kinds_RKS[torch.arange(len(kind_R), device=kind_R.device), kind_R]
        return view.masked(chosen_RS + share_RS)

    def _kinds(self, view: View, share_RS: Tensor) -> Tensor:
        """bool [R, K, S]: the sets of the kinds, from the cheapest to everything."""
        slot_S = torch.arange(share_RS.shape[1], device=share_RS.device)
        first_RS = (view.position_RS < self.sinks) & view.valid_RS
        hit_RS = first_RS | select_top(view.masked(share_RS), (self.frequent * view.len_R).long())
        latest_RS = hit_RS | (slot_S >= (view.len_R - (self.local * view.len_R).long()).unsqueeze(-1)) & view.valid_RS
        return torch.stack((first_RS, hit_RS, latest_RS, view.valid_RS), dim=1)
