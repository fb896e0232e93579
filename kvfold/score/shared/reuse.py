"""Layer-wise index reuse: layers that take the scores of the layer below (ChunkKV, arXiv:2502.00299).

Neighbouring layers look for much the same tokens; where a scorer says `reuse_layers` = n, only every n-th compressible
layer is scored and the n - 1 above it choose by its scores. Scores meet by position, so layers that hold different
slots, after an eviction by another scorer or under budgets that differ by layer, still agree on the tokens.

    R rows   S slots   P positions, and one more column for padding
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.score.base import Scorer, View
from kvfold.score.shared.positions import by_position


class Reuse:
    """The scores of one round of compression; layers arrive in order."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self._led_RP: Tensor | None = None

    def score(self, view: View, place: int) -> Tensor:
        """Scores of the layer that is the `place`-th compressible one, its own or those of the layer that leads it."""
        led_RP = self._led_RP
        if place % self.scorer.reuse_layers and led_RP is not None and len(led_RP) == len(view.position_RS):
            return view.masked(led_RP.gather(1, view.position_RS))
        score_RS = view.masked(self.scorer.score(view))
        if self.scorer.reuse_layers > 1:
            # A token that the leading row does not hold comes after all that it holds.
            self._led_RP = by_position(score_RS, view, torch.finfo(score_RS.dtype).min)
        return score_RS
