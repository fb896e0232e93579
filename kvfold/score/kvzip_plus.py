"""`kvzip_plus`: KVzip's weights times the norm of projected values (KVzip+, arXiv:2601.07891).

R rows   S slots   G query heads per KV head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Needs, Replay, Scorer, View
from kvfold.score.shared.checks import at_least, given
from kvfold.score.shared.output import output_norms


@register(
    "score",
    "kvzip_plus",
    paper="arXiv:2601.07891",
    cost="a second prefill, the whole cache held; L·d·M",
    published="as published in kvpress; a system prompt as for `kvzip`",
)
@dataclass(frozen=True)
class KVzipPlus(Scorer):
    """Keep what changes hidden states most while the model repeats the text; pair it with `global`.

    score = maximum over group and queries of a |v W_o|_2 / |h|, with a the weight that `kvzip` takes the maximum of,
    W_o the output projection of the query's head, and h the hidden state that attention was given for the query. The
    sinks are +inf.

    As kvpress' KVzipPress with its normalisation on; differences as for `kvzip`.
    """

    chunk: int = 2048
    sinks: int = 4

    def __post_init__(self) -> None:
        at_least("kvzip_plus", "chunk", self.chunk, 1)
        at_least("kvzip_plus", "sinks", self.sinks, 0)

    @property
    def needs(self) -> Needs:
        replay = Replay(self.chunk, self.sinks, by_hidden=True)
        return Needs(sinks=self.sinks, replay=replay, output=True, end_of_prompt=True)

    def score(self, view: View) -> Tensor:
        largest_RGS = given("kvzip_plus", view.replay_RGS, "replay_RGS")
        change_RS = (largest_RGS * output_norms("kvzip_plus", view, 2)).amax(1)
        return view.masked(change_RS.masked_fill(view.position_RS < self.sinks, torch.inf))
