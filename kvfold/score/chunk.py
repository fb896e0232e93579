"""`chunk`: tokens are kept or evicted in chunks of neighbours (ChunkKV, arXiv:2502.00299).

R rows   S slots   P positions   C chunks
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from kvfold.policy.registry import register
from kvfold.score.base import Scorer, View
from kvfold.score.shared.checks import at_least
from kvfold.score.shared.grouped import Grouped
from kvfold.score.shared.positions import by_position
from kvfold.score.snapkv import SnapKV

_SNAPKV = SnapKV()


@register(
    "score",
    "chunk",
    paper="arXiv:2502.00299",
    cost="that of its score, over reuse",
    published="differs: the size is exact, the last chunk is cut",
)
@dataclass(frozen=True)
class Chunk(Grouped):
    """Keep whole runs of `size` tokens, those that another score likes best on average.

    score = mean of the inner score over the slots of the chunk, position // size; with `shared` over all heads of the
    sequence, so that they keep the same tokens. What the inner score always keeps (+inf) stays so by itself and takes
    no part in the means. With `reuse` = n, only every n-th layer is scored and the n - 1 above keep what it keeps.

    Against the paper: its chunks are 10 tokens and its score is snapkv's, the defaults here; it finds n = 2 nearly free
    and n = 3 costly. Against kvpress' ChunkKVPress (20 tokens, no reuse): chunks are told by position, so a second
    compression meets the same ones; a window's slots do not carry the rest of their chunk along; and the size is
    exact: the last chunk that fits is cut, where kvpress rounds the number of chunks down.
    """

    scorer: Scorer = _SNAPKV
    size: int = 10
    shared: bool = True
    reuse: int = 1

    def __post_init__(self) -> None:
        at_least("chunk", "size", self.size, 1)
        self.check_inner("chunk")

    def group_RS(self, view: View) -> Tensor:
        return view.position_RS // self.size

    def sums_RC(self, x_RS: Tensor, view: View) -> Tensor:
        x_RP = by_position(x_RS, view, 0.0)
        padded_RP = functional.pad(x_RP, (0, -x_RP.shape[1] % self.size))
        return padded_RP.view(len(x_RP), -1, self.size).sum(-1)
