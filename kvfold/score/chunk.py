"""Tokens stay or go together with their neighbours (ChunkKV, arXiv:2502.00299): meaning lies in phrases, not in tokens.

R rows   S slots   B sequences   H KV heads   P positions   C chunks
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.errors import PolicyError
from kvfold.policy.registry import register, term_of
from kvfold.score.base import Needs, Scorer, View
from kvfold.score.checks import at_least
from kvfold.score.positions import by_position
from kvfold.score.snapkv import SnapKV

_SNAPKV = SnapKV()


@register("score", "chunk", paper="arXiv:2502.00299", cost="that of its score, over reuse")
@dataclass(frozen=True)
class Chunk(Scorer):
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
        at_least("chunk", "reuse", self.reuse, 1)
        inner = term_of(self.scorer).name
        if self.scorer.keeps_all:
            raise PolicyError(f"chunk({inner}): the inner score keeps everything; name one that evicts")
        if self.scorer.reuse_layers > 1:
            raise PolicyError(f"chunk({inner}): reuse has no effect inside another score; write it on the outer chunk")

    @property
    def needs(self) -> Needs:
        return self.scorer.needs

    @property
    def reuse_layers(self) -> int:
        return self.reuse

    @property
    def default_prefill_trigger(self) -> str:
        inner: str = getattr(self.scorer, "default_prefill_trigger", "after_prefill")
        return inner

    def score(self, view: View) -> Tensor:
        score_RS = view.masked(self.scorer.score(view))
        free_RS = score_RS.isfinite()
        total_RC = self._sums(score_RS.masked_fill(~free_RS, 0.0), view)
        count_RC = self._sums(free_RS.float(), view)
        mean_RS = (total_RC / count_RC.clamp(min=1)).gather(1, view.position_RS // self.size)
        return view.masked(torch.where(free_RS, mean_RS, score_RS))

    def _sums(self, x_RS: Tensor, view: View) -> Tensor:
        x_RP = by_position(x_RS, view, 0.0)
        padded_RP = functional.pad(x_RP, (0, -x_RP.shape[1] % self.size))
        x_RC = padded_RP.view(len(x_RP), -1, self.size).sum(-1)
        if not self.shared:
            return x_RC
        x_BC = x_RC.view(-1, view.num_heads, x_RC.shape[1]).sum(1)
        return x_BC.repeat_interleave(view.num_heads, dim=0)
