"""Answers to questions about a held prompt, token by token, and what its cache answered their queries (self-study).

Every answer is read beside the held cache (beside.py) and sees nothing of the others; nothing of them stays.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from kvfold.attend.lse_merge import compute_dtype
from kvfold.compress.full_prompt import FullPrompt
from kvfold.evicted.base import CalibrationTargets
from kvfold.passes.prefill import LayerBuffer
from kvfold.passes.probe import Answers, ProbeAttention, grown, together


class SelfStudyPass:
    """Questions with their answers, each of at most `most_tokens` tokens; run the model over them as they come."""

    def __init__(self, held: FullPrompt, most_tokens: int) -> None:
        self.held = held
        self.most_tokens = most_tokens
        self._buffers: dict[tuple[int, int], LayerBuffer] = {}  # by layer and question
        self._answers: dict[int, list[Answers]] = defaultdict(list)

    def attend(self, layer: int, index: int, q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Tensor:
        """The next tokens of one question in this layer; returns the attention output [Q, T, D]."""
        spec, dtype = self.held.sequence.spec.layers[layer], compute_dtype(q_QTD)
        buffer = grown(self._buffers.get((layer, index)), self.most_tokens, k_HTD, v_HTD, self.held, dtype)
        self._buffers[layer, index] = buffer
        beside = ProbeAttention(self.held, layer, q_QTD.to(dtype).unflatten(0, (spec.num_kv_heads, spec.group)), buffer)
        if spec.compressible:
            self._answers[layer].append(Answers(*(column.clone() for column in beside.answers)))  # a view keeps all
        return beside.output().to(q_QTD.dtype)

    def asked(self) -> list[CalibrationTargets | None]:
        """Of every layer, all queries and what the heads answered."""
        layers = self.held.sequence.spec.layers
        return [together(self._answers[i], spec.scale) if i in self._answers else None for i, spec in enumerate(layers)]
