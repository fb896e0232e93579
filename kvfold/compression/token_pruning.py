"""Token pruning during prefill (FastKV): tokens dropped between two layers, by the policy's term (token_pruning.py).

The last layer that runs on all tokens, and some layers before it, score tokens by the attention of the prompt's last
queries. Later layers run on the kept tokens alone and store gaps at the positions of the pruned ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from kvfold.compression.round import protected, protected_mask
from kvfold.compression.view import NewSlots, build_view
from kvfold.pages.sequence import SequenceCache
from kvfold.token_pruning import at_new_tokens, kept_tokens


class PrunedTokens:
    """`kept[i]`: the tokens of sequence i that still run, ascending, None for all; `num_running[i]`: how many.

    `whole`: prune nothing, whatever the policies say.
    """

    def __init__(self, sequences: Sequence[SequenceCache], num_tokens: Sequence[int], *, whole: bool) -> None:
        self.sequences = list(sequences)
        self.num_running = list(num_tokens)
        self.kept: list[Tensor | None] = [None] * len(self.sequences)
        prunings = [sequence.policy.token_pruning for sequence in sequences]
        self._last_full_layer = [
            pruning.last_full_layer(sequence.spec.num_layers) if pruning.prunes and not whole else None
            for pruning, sequence in zip(prunings, sequences, strict=True)
        ]
        self._importance: dict[int, Tensor] = {}  # [T], summed over the scoring layers so far
        self._pending: dict[int, Tensor] = {}  # kept tokens, applied after the running layer

    def score(self, index: int, layer: int, new: NewSlots, num_last: int) -> None:
        """Add this layer's scores of a sequence's tokens; select after the last full layer. The last `num_last` are
        kept."""
        sequence, last_full_layer = self.sequences[index], self._last_full_layer[index]
        pruning = sequence.policy.token_pruning
        if last_full_layer is None or not pruning.scores_layer(layer, sequence.spec.num_layers):
            return
        num_kept = pruning.num_kept(new.num_tokens)
        if num_kept == new.num_tokens:
            return
        view = build_view(sequence, layer, new, pruning.needs)
        importance_T = at_new_tokens(pruning.importance(view), view, new.num_tokens).sum(0)
        if index in self._importance:
            importance_T += self._importance.pop(index)
        if layer < last_full_layer:
            self._importance[index] = importance_T
        else:
            # Also the last ones, whose queries later layers observe.
            is_last_RS = view.position_RS >= view.seen_R.unsqueeze(-1) - max(num_last, 1)
            protect = protected(sequence, sequence.policy.prefill, new.end)
            protected_RS = protected_mask(sequence, protect, view) | is_last_RS
            protected_T = at_new_tokens(protected_RS, view, new.num_tokens).any(0)
            self._pending[index] = kept_tokens(importance_T, num_kept, protected_T)

    def prune(self) -> Tensor | None:
        """After a layer: the kept ones of the tokens that ran, packed over all sequences; None for all."""
        if not self._pending:
            return None
        starts = [0, *accumulate(self.num_running)]
        parts = []
        for index, (start, length) in enumerate(zip(starts, self.num_running, strict=False)):
            kept_K = self._pending.get(index)
            if kept_K is None:
                kept_K = torch.arange(length, device=self.sequences[index].arena.device)
            else:
                self.kept[index], self.num_running[index] = kept_K, len(kept_K)
            parts.append(start + kept_K)
        self._pending = {}
        return torch.cat(parts)
