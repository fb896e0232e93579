"""Tokens that a prefill pass leaves behind between two layers, where its policies say so (kvfold/token_pruning.py).

After the last layer that runs on all tokens, its keys and the prompt's last queries, and those of some layers before
it, decide who goes on. Later layers are shorter: what they store has gaps, at the positions of those who stayed behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvfold.compress.round import protected
from kvfold.compress.view import NewSlots, build_view
from kvfold.pages.sequence import SequenceCache
from kvfold.score.base import View
from kvfold.token_pruning import at_new_tokens, kept_tokens


class PrunedTokens:
    """`going[i]`: the tokens of sequence i that still run, ascending, None for all; `num_running[i]`: how many.

    `whole`: every policy is to be run as if it left nobody behind.
    """

    def __init__(self, sequences: Sequence[SequenceCache], num_tokens: Sequence[int], *, whole: bool) -> None:
        self.sequences = list(sequences)
        self.num_running = list(num_tokens)
        self.going: list[Tensor | None] = [None] * len(self.sequences)
        ways = [sequence.policy.token_pruning for sequence in sequences]
        self._last_full_layer = [
            way.last_full_layer(sequence.spec.num_layers) if way.prunes and not whole else None
            for way, sequence in zip(ways, sequences, strict=True)
        ]
        self._importance: dict[int, Tensor] = {}  # [T], of the layers that were asked so far
        self._chosen: dict[int, Tensor] = {}  # for after the layer that is running

    def look(self, index: int, layer: int, new: NewSlots, num_last: int) -> None:
        """All tokens of a sequence were in this layer: let it vote, and choose behind the last. `num_last` go on."""
        sequence, last_full_layer = self.sequences[index], self._last_full_layer[index]
        way = sequence.policy.token_pruning
        if last_full_layer is None or not way.scores_layer(layer, sequence.spec.num_layers):
            return
        num_kept = way.num_kept(new.num_tokens)
        if num_kept == new.num_tokens:
            return
        view = build_view(sequence, layer, new, way.needs)
        importance_T = at_new_tokens(way.importance(view), view, new.num_tokens).sum(0)
        if index in self._importance:
            importance_T += self._importance.pop(index)
        if layer < last_full_layer:
            self._importance[index] = importance_T
        else:
            must_T = at_new_tokens(_must_go_on(sequence, view, new.end, num_last), view, new.num_tokens).any(0)
            self._chosen[index] = kept_tokens(importance_T, num_kept, must_T)

    def leave(self) -> Tensor | None:
        """After a layer: which of the tokens that ran go on, packed over all sequences; None where all do."""
        if not self._chosen:
            return None
        starts = [0, *accumulate(self.num_running)]
        parts = []
        for index, (start, length) in enumerate(zip(starts, self.num_running, strict=False)):
            chosen_K = self._chosen.get(index)
            if chosen_K is None:
                chosen_K = torch.arange(length, device=self.sequences[index].arena.device)
            else:
                self.going[index], self.num_running[index] = chosen_K, len(chosen_K)
            parts.append(start + chosen_K)
        self._chosen = {}
        return torch.cat(parts)


def _must_go_on(sequence: SequenceCache, view: View, seen_len: int, num_last: int) -> Tensor:
    """bool [R, S]: what the policy protects, pinned spans, and the last tokens, whose queries later layers look at."""
    protect = protected(sequence, sequence.policy.prefill, seen_len)
    must_RS = protect.mask(view.position_RS, view.seen_R)
    must_RS = must_RS | (view.position_RS >= view.seen_R.unsqueeze(-1) - max(num_last, 1))
    for start, end in sequence.pinned:
        must_RS = must_RS | ((view.position_RS >= start) & (view.position_RS < end))
    return must_RS
