"""Probe passes (KVzip replay, self-study): queries attend to the uncompressed prompt cache and are not appended to it.

    | stored | full prompt |  probe: position `prompt.end` on

A probe token attends to everything stored, to the full prompt and to the probe tokens before it. The outputs of the
cache to probe queries are the calibration targets of `fit`. Replay has a file of its own (replay.py).

    H KV heads   G query heads per KV head   Q query heads   T queries   D head dim
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvfold.attend.lse_merge import LseMerge, compute_dtype
from kvfold.attend.paged import KVPart, kv_parts, run_parts
from kvfold.compression.full_prompt import FullPrompt
from kvfold.evicted.base import CalibrationTargets
from kvfold.passes.prefill import LayerBuffer, merge_new


class Answers(NamedTuple):
    """Outputs of the cache to queries, and its share of their attention."""

    q_HGTD: Tensor
    out_HGTD: Tensor
    lse_HGT: Tensor
    share_HGT: Tensor


class ProbeAttention:
    """The next probe tokens in one layer, behind those in `buffer`: the layer's others so far, None before the first;
    there are at most `most_tokens`."""

    def __init__(
        self,
        prompt: FullPrompt,
        layer: int,
        buffer: LayerBuffer | None,
        most_tokens: int,
        q_QTD: Tensor,
        k_HTD: Tensor,
        v_HTD: Tensor,
    ) -> None:
        spec, dtype, kv_dtype = prompt.sequence.spec.layers[layer], compute_dtype(q_QTD), prompt.sequence.spec.kv_dtype
        self.buffer = LayerBuffer.empty(most_tokens, k_HTD, v_HTD, dtype) if buffer is None else buffer
        offset = self.buffer.filled
        self.buffer.append(k_HTD.to(kv_dtype), v_HTD.to(kv_dtype))
        self._dtype = q_QTD.dtype
        self.q_HGTD = q_HGTD = q_QTD.to(dtype).unflatten(0, (spec.num_kv_heads, spec.group))
        self._cache, self._own = LseMerge(q_HGTD), LseMerge(q_HGTD)
        self.stored = added(self._cache, kv_parts(prompt.sequence, layer, q_HGTD, prompt.end + offset), spec.scale)
        stored_HGT = self._cache.lse_HGT
        self.prompt = added(self._cache, _prompt_parts(prompt, layer, q_HGTD, offset), spec.scale)
        merge_new(self._own, q_HGTD, self.buffer, offset, spec)
        own_HGT, self._cache_HGT = self._own.lse_HGT, self._cache.lse_HGT
        assert own_HGT is not None
        self._own_HGT = own_HGT
        self.near_HGT = own_HGT if stored_HGT is None else torch.logaddexp(stored_HGT, own_HGT)  # all but the prompt

    @property
    def whole_HGT(self) -> Tensor:
        """Log-sum-exp over everything."""
        assert self._cache_HGT is not None
        return torch.logaddexp(self._cache_HGT, self._own_HGT)

    @property
    def answers(self) -> Answers:
        """Read before `output`; not of sliding-window layers."""
        assert self._cache_HGT is not None
        share_HGT = torch.sigmoid(self._cache_HGT - self._own_HGT)
        return Answers(self.q_HGTD, self._cache.result(), self._cache_HGT, share_HGT)

    def output(self) -> Tensor:
        """Attention to everything, [Q, T, D]."""
        self._cache.add(slice(0, len(self.q_HGTD)), self._own.result(), self._own_HGT)
        return self._cache.result().flatten(0, 1).to(self._dtype)


def added(merge: LseMerge, parts: Iterable[KVPart], scale: float) -> list[KVPart]:
    """Merge attention to parts; returns them as a list."""
    found = list(parts)
    for part in found:
        merge.add(part.heads, *part.attend(scale))
    return found


def joined_targets(prompt: FullPrompt, answers: Mapping[int, Sequence[Answers]]) -> list[CalibrationTargets | None]:
    """The targets that `fit` reproduces, of every layer, from the answers in some."""
    found: list[CalibrationTargets | None] = [None] * prompt.sequence.spec.num_layers
    for layer, parts in answers.items():
        q, out, lse, share = (torch.cat(column, dim=2).flatten(1, 2) for column in zip(*parts, strict=True))
        found[layer] = CalibrationTargets(q, out, lse, share, prompt.sequence.spec.layers[layer].scale)
    return found


def _prompt_parts(prompt: FullPrompt, layer: int, q_HGTD: Tensor, offset: int) -> Iterator[KVPart]:
    window = prompt.sequence.spec.layers[layer].sliding_window
    reach = None if window is None else (window, prompt.end + offset)
    return run_parts(prompt.segment.layers[layer], q_HGTD, [0] * q_HGTD.shape[0], reach)


class SelfStudyPass:
    """Questions about the prompt with their answers, each of at most `most_tokens` tokens; run the model over them as
    they come. A question does not see the others."""

    def __init__(self, prompt: FullPrompt, most_tokens: int) -> None:
        self.prompt = prompt
        self.most_tokens = most_tokens
        self._buffers: dict[tuple[int, int], LayerBuffer] = {}  # by layer and question
        self._answers: dict[int, list[Answers]] = defaultdict(list)

    def attend(self, layer: int, index: int, q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Tensor:
        """The next tokens of one question in this layer; returns the attention output [Q, T, D]."""
        buffer = self._buffers.get((layer, index))
        probe = ProbeAttention(self.prompt, layer, buffer, self.most_tokens, q_QTD, k_HTD, v_HTD)
        self._buffers[layer, index] = probe.buffer
        if self.prompt.sequence.spec.layers[layer].compressible:
            self._answers[layer].append(Answers(*(column.clone() for column in probe.answers)))  # a view keeps all
        return probe.output()

    def targets(self) -> list[CalibrationTargets | None]:
        """Of every layer, all queries and the outputs of its heads."""
        return joined_targets(self.prompt, self._answers)
