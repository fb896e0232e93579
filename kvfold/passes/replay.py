"""Replay (KVzip context reconstruction, arXiv:2505.23416): the model repeats the prompt over its uncompressed cache.

Slots that the repetition attends to are those the text can be rebuilt from: a question-agnostic score. The repetition
is a probe (probe.py) and is not stored. Observed is each slot's largest weight under a softmax over the earlier slots,
the sinks, the chunk and the repetition itself.

    | stored | prompt: … chunk … |  request, chunk again  |
                   begin  end     position `prompt.end` on

A query may be weighted by the surprise of the token it is about to repeat; queries of the request, and those before a
token of unknown surprise, have weight 1.

    H KV heads   G query heads per KV head   Q query heads   T queries   S slots   N new slots   D head dim
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvfold.attend.lse_merge import LseMerge
from kvfold.attend.paged import KVPart
from kvfold.compression.full_prompt import FullPrompt
from kvfold.evicted.base import CalibrationTargets
from kvfold.pages.async_copy import upload
from kvfold.passes.prefill import LayerBuffer
from kvfold.passes.probe import Answers, ProbeAttention, added, joined_targets
from kvfold.score.attention import column_max
from kvfold.score.base import Replay
from kvfold.yielding import yield_point

_LEAST = 1e-6  # weight of a query: slots that only predictable tokens attend to keep their order


@dataclass
class _Maxima:
    """The largest weights so far, of one layer under one kind of replay."""

    stored_HGS: Tensor
    new_HGN: Tensor


class ReplayPass:
    """Repeats chunks of the prompt, for `kinds` of one chunk length. `begin` each, then run the model over it."""

    def __init__(self, prompt: FullPrompt, kinds: Sequence[Replay], surprise_N: Tensor | None = None) -> None:
        self.prompt = prompt
        self.surprise_N = surprise_N  # -ln p of the prompt's tokens in the first reading
        self.sequence = prompt.sequence
        self.kinds = list(kinds)
        self.hidden_norm_T: Tensor | None = None  # of what the attention of the running layer was given
        self._kinds = list(dict.fromkeys(map(_without_queries, kinds)))
        self._maxima: dict[tuple[int, Replay], _Maxima] = {}
        self._answers: dict[tuple[int, int], list[Answers]] = defaultdict(list)  # by layer and how many are kept
        self._chunk = slice(0, 0)
        self._num_tokens = 0
        self._buffer: LayerBuffer | None = None

    @property
    def needs_hidden_norms(self) -> bool:
        return any(kind.by_hidden for kind in self.kinds)

    def begin(self, chunk: slice, num_tokens: int) -> None:
        """The next `num_tokens` tokens repeat this part of the prompt."""
        self._chunk, self._num_tokens, self._buffer = chunk, num_tokens, None

    def attend(self, layer: int, index: int, q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Tensor:
        """The next tokens of the repetition in this layer; returns the attention output [Q, T, D]."""
        if self._buffer is not None and self._buffer.filled == self._num_tokens:
            self._buffer = None  # of the layer before
        probe = ProbeAttention(self.prompt, layer, self._buffer, self._num_tokens, q_QTD, k_HTD, v_HTD)
        self._buffer = probe.buffer
        tokens = slice(probe.buffer.filled - k_HTD.shape[1], probe.buffer.filled)
        yield_point()
        if self.sequence.spec.layers[layer].compressible:
            self._keep_answers(layer, probe, tokens)
            self._observe(layer, probe, tokens)
        return probe.output()

    def _observe(self, layer: int, probe: ProbeAttention, tokens: slice) -> None:
        """Raise the largest weights of what is stored and of the chunk."""
        scale = self.sequence.spec.layers[layer].scale
        chunk = _cut(probe.prompt, self._chunk)
        for kind in self._kinds:
            lse_HGT = self._lse(kind, probe, scale)
            if kind.by_hidden:
                assert self.hidden_norm_T is not None
                lse_HGT = lse_HGT + self.hidden_norm_T[tokens].log()
            if kind.surprise:
                lse_HGT = lse_HGT - self._counts(kind.surprise)[tokens].log()
            yield_point()
            maxima = self._maxima_of(layer, kind, probe.q_HGTD)
            for total_HGS, parts in ((maxima.stored_HGS, probe.stored), (maxima.new_HGN, chunk)):
                for part in parts:
                    _raise(total_HGS, part, lse_HGT, scale)

    def _counts(self, surprise: float) -> Tensor:
        """How much each query of the repetition counts, [T]."""
        assert self.surprise_N is not None
        known_N = self.surprise_N[self._chunk.start : self._chunk.stop + 1]
        num_asked = self._num_tokens - len(_range(self._chunk))
        next_T = pad(known_N, (num_asked, 1), value=torch.inf)[1 : self._num_tokens + 1]
        return (next_T / surprise).clamp(_LEAST, 1.0)

    def _lse(self, kind: Replay, probe: ProbeAttention, scale: float) -> Tensor:
        """Log-sum-exp over what is stored, the sinks, the chunk and the repetition."""
        num_sinks = min(max(0, kind.sinks - self.prompt.start), self._chunk.start)
        if self._chunk.stop - self._chunk.start + num_sinks == self.prompt.num_tokens:
            return probe.whole_HGT
        merge = LseMerge(probe.q_HGTD)
        for slots in (slice(0, num_sinks), self._chunk):
            added(merge, _cut(probe.prompt, slots), scale)
        assert merge.lse_HGT is not None
        return torch.logaddexp(probe.near_HGT, merge.lse_HGT)

    def _maxima_of(self, layer: int, kind: Replay, q_HGTD: Tensor) -> _Maxima:
        found = self._maxima.get((layer, kind))
        if found is None:
            num_stored, shape = max(self.sequence.stored_lens(layer)), q_HGTD.shape[:2]
            stored_HGS = torch.zeros(*shape, num_stored, device=q_HGTD.device)
            new_HGN = torch.zeros(*shape, self.prompt.num_tokens, device=q_HGTD.device)
            found = self._maxima[layer, kind] = _Maxima(stored_HGS, new_HGN)
        return found

    def _keep_answers(self, layer: int, probe: ProbeAttention, tokens: slice) -> None:
        """Those to evenly spaced tokens of what is repeated, request and all."""
        behind = self._num_tokens - self._chunk.stop  # from a token's place in the prompt to that in the repetition
        for count in {kind.queries for kind in self.kinds if kind.queries}:
            number = min(count, self.prompt.num_tokens)
            spaced = (i * self.prompt.num_tokens // number for i in range(number))
            places = [place + behind - tokens.start for place in spaced if place in _range(self._chunk)]
            mine = [place for place in places if 0 <= place < probe.q_HGTD.shape[2]]
            if mine:
                mine_T = upload(mine, probe.q_HGTD.device)
                self._answers[layer, count].append(Answers(*(column[:, :, mine_T] for column in probe.answers)))

    def targets(self, kind: Replay) -> list[CalibrationTargets | None]:
        """Of every layer, the queries of as many tokens as the kind says, fewer where the text is shorter, and what the
        heads answered; the targets that `fit` reproduces."""
        mine = {layer: parts for (layer, count), parts in self._answers.items() if count == kind.queries}
        return joined_targets(self.prompt, mine)

    def maxima(self, kind: Replay) -> list[Tensor | None]:
        """Of every layer [H, G, S], stored then new slots of each head; None where nothing competes."""
        return [self._joined(layer, kind) for layer in range(self.sequence.spec.num_layers)]

    def _joined(self, layer: int, kind: Replay) -> Tensor | None:
        found = self._maxima.get((layer, _without_queries(kind)))
        if found is None or found.stored_HGS.shape[-1] == 0:
            return None if found is None else found.new_HGN
        heads = zip(found.stored_HGS, found.new_HGN, self.sequence.stored_lens(layer), strict=True)
        rows = [torch.cat((old_GS[:, :length], new_GN), dim=1).t() for old_GS, new_GN, length in heads]
        return pad_sequence(rows, batch_first=True).transpose(1, 2)


def _without_queries(kind: Replay) -> Replay:
    """The kind as far as it decides which weights are observed."""
    return replace(kind, queries=0, study=0)


def _range(part: slice) -> range:
    return range(part.start, part.stop)


def _cut(parts: Iterable[KVPart], slots: slice) -> list[KVPart]:
    """The parts' slots among `slots`; heads of one part start at one slot."""
    found = []
    for part in parts:
        first = part.first[0]
        begin, end = max(slots.start - first, 0), min(slots.stop - first, part.k_hSD.shape[1])
        if begin < end:
            assert part.bias_hS is None  # the full prompt is uncompressed
            k_hSD, v_hSD = part.k_hSD[:, begin:end], part.v_hSD[:, begin:end]
            found.append(replace(part, first=[first + begin] * len(part.first), k_hSD=k_hSD, v_hSD=v_hSD))
    return found


def _raise(total_HGS: Tensor, part: KVPart, lse_HGT: Tensor, scale: float) -> None:
    lse_hGT = lse_HGT[part.heads]
    if part.offset_hGT is not None:
        lse_hGT = lse_hGT - part.offset_hGT * scale
    found_hGS = column_max(part.q_hGTD, part.k_hSD, lse_hGT, scale)
    if part.bias_hS is not None:
        found_hGS = found_hGS * part.bias_hS.exp().unsqueeze(1)
    for row_GS, first, found_GS in zip(total_HGS[part.heads], part.first, found_hGS, strict=True):
        mine_GS = row_GS[:, first : first + found_GS.shape[1]]
        torch.maximum(mine_GS, found_GS, out=mine_GS)
