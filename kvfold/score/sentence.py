"""`sentence`: tokens are kept or evicted by sentence (SentenceKV, arXiv:2504.00970).

R rows   S slots   C sentences
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvfold.policy.registry import register
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.shared.checks import at_least, given
from kvfold.score.shared.grouped import Grouped
from kvfold.score.snapkv import SnapKV

_SNAPKV = SnapKV()


@register(
    "score",
    "sentence",
    paper="arXiv:2504.00970",
    cost="that of its score, over reuse",
    published="differs: sentences are kept for good; chosen at every step they are `recall(unit=sentence)`",
)
@dataclass(frozen=True)
class Sentence(Grouped):
    """Keep whole sentences, those that another score likes best on average.

    As `chunk`, with sentences for chunks: one ends at a token whose text ends in . ! ? or an ellipsis (also the CJK
    ones, also inside closing quotes and brackets) or holds a line break, and at an end-of-turn token. A sentence of
    more than `longest` tokens is cut into pieces of that many: code and tables have few full stops.

    Against SentenceKV: sentences are found as it finds them, by the ids of punctuation tokens, but here they are what
    is kept for good; its choice of sentences at every step among those on the host is `recall(unit=sentence)`.
    """

    scorer: Scorer = _SNAPKV
    longest: int = 64
    shared: bool = True
    reuse: int = 1

    def __post_init__(self) -> None:
        at_least("sentence", "longest", self.longest, 1)
        self.check_inner("sentence")

    @property
    def needs(self) -> Needs:
        return replace(self.scorer.needs, sentence_len=self.longest)

    def group_RS(self, view: View) -> Tensor:
        return given("sentence", view.sentence_RS, "sentence_RS")

    def sums_RC(self, x_RS: Tensor, view: View) -> Tensor:
        group_RS = self.group_RS(view)
        num_groups = int(group_RS.max()) + 1
        total_RC = torch.zeros(len(x_RS), num_groups, dtype=torch.float64, device=x_RS.device)
        return total_RC.scatter_add_(1, group_RS, x_RS.double())  # fp64: the order of a GPU's sums does not show
