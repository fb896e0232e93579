"""Attention that the queries of some tokens give to each stored slot, read while they run and never stored.

| stored slots |  question: position `sealed_len` on, not appended

H KV heads   G query heads per KV head   Q query heads   T queries   S slots   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvfold.attend.lse_merge import LseMerge
from kvfold.compression.observe import stored_mass
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.prefill import LayerBuffer, PrefillPass


class QuestionPass(PrefillPass):
    """Run it without `finish`: the sequences stay as they were. `mass[i]` is the attention to each stored slot of
    sequence i, summed over the queries, their heads, and the layers without a sliding window."""

    def __init__(
        self,
        sequences: Sequence[SequenceCache],
        num_tokens: Sequence[int],
        seen_lens: Sequence[int],
        *,
        compress: bool,
        followers: Sequence[SequenceCache],
    ) -> None:
        super().__init__(sequences, num_tokens, seen_lens, compress=compress, followers=followers)
        self.mass: list[Tensor | None] = [None] * len(sequences)

    def _observe(
        self, index: int, layer: int, q_QTD: Tensor, q_HGTD: Tensor, merge: LseMerge, buffer: LayerBuffer, offset: int
    ) -> None:
        sequence = self.sequences[index]
        if not sequence.spec.layers[layer].compressible:
            return
        lse_HGT, before_S = merge.lse_HGT, self.mass[index]
        assert lse_HGT is not None
        mass_S = stored_mass(sequence, layer, q_HGTD, lse_HGT, sequence.sealed_len + offset, whole=True).sum(0)
        self.mass[index] = mass_S if before_S is None else before_S + mass_S
