"""Self-study: the model answers questions about the prompt over its full cache; the outputs are `fit`'s targets.

Every question and its answer is a probe (probe.py): it does not see the others and is not appended to the cache.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from kvfold.attend.lse_merge import compute_dtype
from kvfold.compression.full_prompt import FullPrompt
from kvfold.evicted.base import CalibrationTargets
from kvfold.passes.prefill import LayerBuffer
from kvfold.passes.probe import Answers, ProbeAttention, grown, joined_targets


class SelfStudyPass:
    """Questions with their answers, each of at most `most_tokens` tokens; run the model over them as they come."""

    def __init__(self, prompt: FullPrompt, most_tokens: int) -> None:
        self.prompt = prompt
        self.most_tokens = most_tokens
        self._buffers: dict[tuple[int, int], LayerBuffer] = {}  # by layer and question
        self._answers: dict[int, list[Answers]] = defaultdict(list)

    def attend(self, layer: int, index: int, q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Tensor:
        """The next tokens of one question in this layer; returns the attention output [Q, T, D]."""
        spec, dtype = self.prompt.sequence.spec.layers[layer], compute_dtype(q_QTD)
        buffer = grown(self._buffers.get((layer, index)), self.most_tokens, k_HTD, v_HTD, self.prompt, dtype)
        self._buffers[layer, index] = buffer
        probe = ProbeAttention(
            self.prompt, layer, q_QTD.to(dtype).unflatten(0, (spec.num_kv_heads, spec.group)), buffer
        )
        if spec.compressible:
            self._answers[layer].append(Answers(*(column.clone() for column in probe.answers)))  # a view keeps all
        return probe.output().to(q_QTD.dtype)

    def targets(self) -> list[CalibrationTargets | None]:
        """Of every layer, all queries and the outputs of its heads."""
        layers = self.prompt.sequence.spec.layers
        return [
            joined_targets(self._answers[i], spec.scale) if i in self._answers else None
            for i, spec in enumerate(layers)
        ]
