"""`chunk` and `sentence`: tokens are kept or evicted with their neighbours (ChunkKV, arXiv:2502.00299; SentenceKV,
arXiv:2504.00970), and layers that take the scores of the layer below.

    R rows   S slots   B sequences   C groups of a sequence   P positions, and one more column for padding
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.errors import PolicyError
from kvfold.policy.registry import register, term_of
from kvfold.score.attention import by_position
from kvfold.score.base import Needs, Scorer, View, given, scored
from kvfold.score.snapkv import SnapKV


class Grouped(Scorer):
    """score = mean of the inner score over the slots of the group, with `shared` over all heads of the sequence.

    What the inner score always keeps (+inf) stays so by itself and takes no part in the means. A variant says which
    group each slot is in, and adds up over groups.
    """

    scorer: Scorer
    shared: bool
    reuse: int

    def __post_init__(self) -> None:
        """PolicyError if the inner score cannot stand inside another."""
        super().__post_init__()
        name, inner = term_of(self).name, term_of(self.scorer).name
        if self.scorer.keeps_all:
            raise PolicyError(f"{name}({inner}): the inner score keeps everything; name one that evicts")
        if self.scorer.reuse_layers > 1:
            raise PolicyError(
                f"{name}({inner}): reuse has no effect inside another score; write it on the outer {name}"
            )

    @property
    def needs(self) -> Needs:
        return self.scorer.needs

    @property
    def reuse_layers(self) -> int:
        return self.reuse

    @property
    def default_prefill_trigger(self) -> str:
        return self.scorer.default_prefill_trigger

    @abstractmethod
    def group_RS(self, view: View) -> Tensor:
        """The group of each slot, counted from 0 in its sequence."""

    @abstractmethod
    def sums_RC(self, x_RS: Tensor, view: View) -> Tensor:
        """Sums over the slots of each group; padding holds 0."""

    def score(self, view: View) -> Tensor:
        score_RS = scored(self.scorer, view)
        free_RS = score_RS.isfinite()
        total_RC = self._shared(self.sums_RC(score_RS.masked_fill(~free_RS, 0.0), view), view)
        count_RC = self._shared(self.sums_RC(free_RS.float(), view), view)
        mean_RS = (total_RC / count_RC.clamp(min=1)).gather(1, self.group_RS(view))
        return view.masked(torch.where(free_RS, mean_RS.float(), score_RS))

    def _shared(self, x_RC: Tensor, view: View) -> Tensor:
        if not self.shared:
            return x_RC
        x_BC = x_RC.view(-1, view.num_heads, x_RC.shape[1]).sum(1)
        return x_BC.repeat_interleave(view.num_heads, dim=0)


_SNAPKV = SnapKV()


@register(
    "score", "chunk", paper="arXiv:2502.00299", cost="cost of the inner score / reuse",
    published="differs: the size is exact, the last chunk is cut",
)  # fmt: skip
@dataclass(frozen=True)
class Chunk(Grouped):
    """Keep whole runs of `size` tokens, those that another score likes best on average.

    score = mean of the inner score over the slots of the chunk, position // size; with `shared` over all heads of the
    sequence, so that they keep the same tokens. What the inner score always keeps (+inf) takes no part in the means.
    With `reuse` = n, only every n-th layer is scored and the n - 1 above keep what it keeps.

    Against the paper: its chunks are 10 tokens and its score is snapkv's, the defaults here; it finds n = 2 nearly free
    and n = 3 costly. Against kvpress' ChunkKVPress (20 tokens, no reuse): chunks are told by position, so a second
    compression meets the same ones; a window's slots do not carry the rest of their chunk along; and the size is
    exact: the last chunk that fits is cut, where kvpress rounds the number of chunks down.
    """

    scorer: Scorer = _SNAPKV
    size: int = 10
    shared: bool = True
    reuse: int = 1
    least = (("size", 1), ("reuse", 1))

    def group_RS(self, view: View) -> Tensor:
        return view.position_RS // self.size

    def sums_RC(self, x_RS: Tensor, view: View) -> Tensor:
        x_RP = by_position(x_RS, view, 0.0)
        padded_RP = functional.pad(x_RP, (0, -x_RP.shape[1] % self.size))
        return padded_RP.view(len(x_RP), -1, self.size).sum(-1)


@register(
    "score", "sentence", paper="arXiv:2504.00970", cost="cost of the inner score / reuse",
    published="differs: sentences are kept for good; chosen at every step they are `recall(unit=sentence)`",
)  # fmt: skip
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
    least = (("longest", 1), ("reuse", 1))

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


class Reuse:
    """The scores of one round of compression; layers arrive in order.

    Neighbouring layers look for much the same tokens; where a scorer says `reuse_layers` = n, only every n-th
    compressible layer is scored and the n - 1 above it choose by its scores. Scores meet by position, so layers that
    hold different slots (after an eviction by another scorer, under budgets by layer) still agree on the tokens.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self._led_RP: Tensor | None = None

    def score(self, view: View, place: int) -> Tensor:
        """Scores of the layer that is the `place`-th compressible one, its own or those of the layer that leads it."""
        led_RP = self._led_RP
        if place % self.scorer.reuse_layers and led_RP is not None and len(led_RP) == len(view.position_RS):
            return view.masked(led_RP.gather(1, view.position_RS))
        score_RS = scored(self.scorer, view)
        if self.scorer.reuse_layers > 1:
            # A token that the leading row does not hold comes after all that it holds.
            self._led_RP = by_position(score_RS, view, torch.finfo(score_RS.dtype).min)
        return score_RS
