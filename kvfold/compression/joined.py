"""One layer's selection for many prompts in one go: sequences that hold nothing yet, and scores of slots alone.

One sequence takes some sixty operations for a layer, each of which is a launch on a GPU. Here the heads of all
sequences are rows of one view, and their counts are waited for once.

    B sequences   H KV heads   R rows, B * H   S slots of the longest   N kept slots   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from kvfold.budget.base import Scores
from kvfold.budget.uniform import even_total
from kvfold.compression.round import CompressionRound, protected_mask
from kvfold.core import ModelSpec
from kvfold.pages.async_copy import Download, indices, upload
from kvfold.pages.layer import LayerChange
from kvfold.score.base import View, check_scored, scored, unscored


def select_joined(
    layer: int, rounds: Sequence[CompressionRound], lens: Sequence[int], k_BHSD: Tensor, v_BHSD: Tensor
) -> None:
    """In place of each round's `select`, for rounds whose `joins_with` is the same. Rows are padded on the right."""
    selection = _JoinedSelection(layer, rounds, lens, k_BHSD, v_BHSD)
    for index, compression in enumerate(rounds):
        compression.select_joined(partial(selection.change, index))


class _JoinedSelection:
    """Queued for the device; whoever asks for a change waits for the counts."""

    def __init__(
        self, layer: int, rounds: Sequence[CompressionRound], lens: Sequence[int], k_BHSD: Tensor, v_BHSD: Tensor
    ) -> None:
        first = rounds[0]
        assert first.joins_with is not None
        self._scorer, protect, _ = first.joins_with
        self._k_BHSD, self._v_BHSD, self._layer = k_BHSD, v_BHSD, layer
        num_heads, device = k_BHSD.shape[1], k_BHSD.device
        view = _view(layer, first.sequence.spec, lens, k_BHSD, v_BHSD)
        score_RS = scored(self._scorer, view)
        self._is_unscored = Download(unscored(score_RS, view)) if score_RS.is_cuda else None
        score_RS = score_RS.masked_fill(protected_mask(first.sequence, protect, view) & view.valid_RS, torch.inf)
        scores = Scores(score_RS.unflatten(0, (-1, num_heads)))
        total_B = upload([num_heads * one.budget.slots_per_head for one in rounds if one.budget is not None], device)
        count_BH = even_total(scores, total_B.view(-1, 1, 1))
        self._keep_BHS, self._count_BH = scores.select(count_BH), Download(count_BH)

    def change(self, index: int) -> LayerChange:
        """Of one of the sequences."""
        return self._changes[index]

    @cached_property
    def _changes(self) -> list[LayerChange]:
        counts: list[list[int]] = self._count_BH.wait().tolist()
        if self._is_unscored is not None:
            check_scored(self._scorer, self._layer, bool(self._is_unscored.wait()))
        lens = list(map(sum, counts))
        place_N = indices(self._keep_BHS.flatten(), sum(lens))
        kept = (x_BHSD.flatten(0, 2).index_select(0, place_N) for x_BHSD in (self._k_BHSD, self._v_BHSD))
        columns = (*kept, place_N % self._keep_BHS.shape[-1])
        each = zip(*(column.split(lens) for column in columns), counts, strict=True)
        return [LayerChange(*parts) for parts in each]


def _view(layer: int, spec: ModelSpec, lens: Sequence[int], k_BHSD: Tensor, v_BHSD: Tensor) -> View:
    _, num_heads, num_slots, _ = k_BHSD.shape
    len_R = upload(lens, k_BHSD.device).repeat_interleave(num_heads)
    slot_S = torch.arange(num_slots, device=k_BHSD.device)
    valid_RS = slot_S < len_R.unsqueeze(-1)
    return View(
        layer=layer,
        num_layers=spec.num_layers,
        spec=spec.layers[layer],
        num_heads=num_heads,
        k_RSD=k_BHSD.flatten(0, 1),
        v_RSD=v_BHSD.flatten(0, 1),
        position_RS=slot_S * valid_RS,
        valid_RS=valid_RS,
        seen_R=len_R,
    )
