"""`streaming`: attention sinks and a sliding window (StreamingLLM, arXiv:2309.17453).

Softmax must put its mass somewhere, and trained models put it on the first tokens; a window that drops them breaks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.recent import recency
from kvfold.score.shared.checks import at_least


@register(
    "score",
    "streaming",
    paper="arXiv:2309.17453",
    published="as published with `slot`",
)
@dataclass(frozen=True)
class Streaming(Scorer):
    """Keep the first `sinks` tokens and the latest ones.

    score = +inf for positions below `sinks`, else position - seen. The recent window is what the size leaves.

    Against the paper: sinks default to its 4; which position a kept key has is the `position` axis (`slot` is the
    paper's choice, the default keeps original positions). Against kvpress: sinks are told by position, not by slot,
    so repeated compression never loses them.
    """

    sinks: int = 4

    def __post_init__(self) -> None:
        at_least("streaming", "sinks", self.sinks, 0)

    @property
    def needs(self) -> Needs:
        return Needs(sinks=self.sinks)

    @property
    def default_prefill_trigger(self) -> str:
        return "between_chunks"

    def score(self, view: View) -> Tensor:
        return view.masked(recency(view).masked_fill(view.position_RS < self.sinks, torch.inf))
