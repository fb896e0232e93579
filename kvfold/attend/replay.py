"""The second reading of a prompt (KVzip, arXiv:2505.23416): the model repeats the text while its whole cache is there.

What the repetition attends to is what the text can be rebuilt from, whatever is asked later. Its tokens attend to all
that is stored and held, as any next token would; what is observed is each slot's largest weight under a softmax over
what a chunk's repetition is about: earlier slots, sinks, the chunk and the repetition itself. Nothing is stored.

    | stored | held: … chunk … |  request, chunk again  |
                   begin  end     position `held.end` on

A query may count by how surprising the token is that it is about to repeat; one of the request, which repeats nothing
yet, and one before a token whose surprise nobody knows count in full.

    H KV heads   G query heads per KV head   Q query heads   T queries   S slots   N new slots   D head dim
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from kvfold.attend.partial import Merge, compute_dtype
from kvfold.attend.prefill import LayerBuffer, add_new
from kvfold.attend.stored import Stretch, plain, stretches
from kvfold.evicted.base import Asked
from kvfold.pages.held import Held
from kvfold.pages.transfer import upload
from kvfold.score.base import Replay
from kvfold.score.columns import column_max

_LEAST = 1e-6  # of what a query counts: slots that only foreseen tokens ask for keep their order


class _Seen(NamedTuple):
    """What the queries of a piece saw: log-sum-exps over what is stored and repeated, and over everything."""

    q_HGTD: Tensor
    near_HGT: Tensor
    whole_HGT: Tensor
    tokens: slice  # of the repetition


class _Answers(NamedTuple):
    """What the cache answered queries, and how much of their attention it had."""

    q_HGTD: Tensor
    out_HGTD: Tensor
    lse_HGT: Tensor
    share_HGT: Tensor


@dataclass
class _Maxima:
    """The largest weights so far, of one layer under one kind of replay."""

    stored_HGS: Tensor
    new_HGN: Tensor


class ReplayPass:
    """Reads chunks of what is held again, for `kinds` of one chunk length. `begin` each, then run the model over it."""

    def __init__(self, held: Held, kinds: Sequence[Replay], surprise_N: Tensor | None = None) -> None:
        self.held = held
        self.surprise_N = surprise_N  # -ln p of what is held, in the first reading
        self.sequence = held.sequence
        self.kinds = list(kinds)
        self.hidden_norm_T: Tensor | None = None  # of what the attention of the running layer was given
        self._watched = list(dict.fromkeys(map(_without_queries, kinds)))
        self._maxima: dict[tuple[int, Replay], _Maxima] = {}
        self._asked: dict[tuple[int, int], list[_Answers]] = defaultdict(list)  # by layer and how many are kept
        self._chunk = slice(0, 0)
        self._num_tokens = 0
        self._buffer: LayerBuffer | None = None

    @property
    def watches_hidden(self) -> bool:
        return any(kind.by_hidden for kind in self.kinds)

    def begin(self, chunk: slice, num_tokens: int) -> None:
        """The next `num_tokens` tokens repeat this part of what is held."""
        self._chunk, self._num_tokens, self._buffer = chunk, num_tokens, None

    def attend(self, layer: int, index: int, q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Tensor:
        """The next tokens of the repetition in this layer; returns the attention output [Q, T, D]."""
        spec, dtype = self.sequence.spec.layers[layer], compute_dtype(q_QTD)
        buffer = self._grown(k_HTD, v_HTD, dtype)
        tokens = slice(buffer.filled - k_HTD.shape[1], buffer.filled)
        q_HGTD = q_QTD.to(dtype).unflatten(0, (spec.num_kv_heads, spec.group))
        merge, own = Merge(q_HGTD), Merge(q_HGTD)
        stored = _added(merge, stretches(self.sequence, layer, q_HGTD, self.held.end + tokens.start), spec.scale)
        stored_HGT = merge.lse_HGT
        held = _added(merge, self._held(layer, q_HGTD, tokens.start), spec.scale)
        add_new(own, q_HGTD, buffer, tokens.start, spec.scale, spec.sliding_window)
        own_HGT, cache_HGT = own.lse_HGT, merge.lse_HGT
        assert own_HGT is not None
        if spec.compressible:
            assert cache_HGT is not None
            share_HGT = torch.sigmoid(cache_HGT - own_HGT)
            self._keep_answers(layer, _Answers(q_HGTD, merge.result(), cache_HGT, share_HGT), tokens)
            near_HGT = own_HGT if stored_HGT is None else torch.logaddexp(stored_HGT, own_HGT)
            seen = _Seen(q_HGTD, near_HGT, torch.logaddexp(cache_HGT, own_HGT), tokens)
            self._watch(layer, seen, stored, held)
        merge.add(slice(0, len(q_HGTD)), own.result(), own_HGT)
        return merge.result().flatten(0, 1).to(q_QTD.dtype)

    def _grown(self, k_HTD: Tensor, v_HTD: Tensor, dtype: torch.dtype) -> LayerBuffer:
        """What was repeated so far in the running layer, with the next tokens behind it, rounded as slots are."""
        buffer = self._buffer
        if buffer is None or buffer.filled == self._num_tokens:
            buffer = self._buffer = LayerBuffer.empty(self._num_tokens, k_HTD, v_HTD, dtype)
        buffer.append(k_HTD.to(self.sequence.spec.kv_dtype), v_HTD.to(self.sequence.spec.kv_dtype))
        return buffer

    def _held(self, layer: int, q_HGTD: Tensor, offset: int) -> Iterator[Stretch]:
        window = self.sequence.spec.layers[layer].sliding_window
        reach = None if window is None else (window, self.held.end + offset)
        return plain(self.held.segment.layers[layer], q_HGTD, [0] * q_HGTD.shape[0], reach)

    def _watch(self, layer: int, seen: _Seen, stored: list[Stretch], held: list[Stretch]) -> None:
        """Raise the largest weights of what is stored and of the chunk."""
        scale = self.sequence.spec.layers[layer].scale
        chunk = _cut(held, self._chunk)
        for kind in self._watched:
            lse_HGT = self._lse(kind, seen, held, scale)
            if kind.by_hidden:
                assert self.hidden_norm_T is not None
                lse_HGT = lse_HGT + self.hidden_norm_T[seen.tokens].log()
            if kind.surprise:
                lse_HGT = lse_HGT - self._counts(kind.surprise)[seen.tokens].log()
            maxima = self._maxima_of(layer, kind, seen.q_HGTD)
            for total_HGS, parts in ((maxima.stored_HGS, stored), (maxima.new_HGN, chunk)):
                for part in parts:
                    _raise(total_HGS, part, lse_HGT, scale)

    def _counts(self, surprise: float) -> Tensor:
        """How much each query of the repetition counts, [T]."""
        assert self.surprise_N is not None
        known_N = self.surprise_N[self._chunk.start : self._chunk.stop + 1]
        num_asked = self._num_tokens - len(_range(self._chunk))
        next_T = pad(known_N, (num_asked, 1), value=torch.inf)[1 : self._num_tokens + 1]
        return (next_T / surprise).clamp(_LEAST, 1.0)

    def _lse(self, kind: Replay, seen: _Seen, held: list[Stretch], scale: float) -> Tensor:
        """Log-sum-exp over what is stored, the sinks, the chunk and the repetition."""
        num_sinks = min(max(0, kind.sinks - self.held.start), self._chunk.start)
        if self._chunk.stop - self._chunk.start + num_sinks == self.held.num_tokens:
            return seen.whole_HGT
        merge = Merge(seen.q_HGTD)
        for slots in (slice(0, num_sinks), self._chunk):
            _added(merge, _cut(held, slots), scale)
        assert merge.lse_HGT is not None
        return torch.logaddexp(seen.near_HGT, merge.lse_HGT)

    def _maxima_of(self, layer: int, kind: Replay, q_HGTD: Tensor) -> _Maxima:
        found = self._maxima.get((layer, kind))
        if found is None:
            num_stored, shape = max(self.sequence.stored_lens(layer)), q_HGTD.shape[:2]
            stored_HGS = torch.zeros(*shape, num_stored, device=q_HGTD.device)
            new_HGN = torch.zeros(*shape, self.held.num_tokens, device=q_HGTD.device)
            found = self._maxima[layer, kind] = _Maxima(stored_HGS, new_HGN)
        return found

    def _keep_answers(self, layer: int, answers: _Answers, tokens: slice) -> None:
        """Those to evenly spaced tokens of what is repeated, request and all."""
        behind = self._num_tokens - self._chunk.stop  # from a token's place in what is held to that in the repetition
        for count in {kind.queries for kind in self.kinds if kind.queries}:
            number = min(count, self.held.num_tokens)
            spaced = (i * self.held.num_tokens // number for i in range(number))
            places = [place + behind - tokens.start for place in spaced if place in _range(self._chunk)]
            mine = [place for place in places if 0 <= place < answers.q_HGTD.shape[2]]
            if mine:
                mine_T = upload(mine, answers.q_HGTD.device)
                self._asked[layer, count].append(_Answers(*(column[:, :, mine_T] for column in answers)))

    def asked(self, kind: Replay) -> list[Asked | None]:
        """Of every layer, the queries of as many tokens as the kind says, fewer where the text is shorter, and what the
        heads answered; the targets that `fit` reproduces."""
        kept = [self._asked.get((layer, kind.queries)) for layer in range(self.sequence.spec.num_layers)]
        scales = (layer.scale for layer in self.sequence.spec.layers)
        return [None if parts is None else _together(parts, scale) for parts, scale in zip(kept, scales, strict=True)]

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


def _together(parts: Sequence[_Answers], scale: float) -> Asked:
    q_HND, out_HND, lse_HN, share_HN = (torch.cat(column, dim=2).flatten(1, 2) for column in zip(*parts, strict=True))
    return Asked(q_HND, out_HND, lse_HN, share_HN, scale)


def _without_queries(kind: Replay) -> Replay:
    """What tells which weights are observed."""
    return replace(kind, queries=0)


def _range(part: slice) -> range:
    return range(part.start, part.stop)


def _added(merge: Merge, parts: Iterable[Stretch], scale: float) -> list[Stretch]:
    """Merge attention to parts, and remember them."""
    found = list(parts)
    for part in found:
        merge.add(part.heads, *part.attend(scale))
    return found


def _cut(parts: Iterable[Stretch], slots: slice) -> list[Stretch]:
    """The parts' slots among `slots`; heads of one part start at one slot."""
    found = []
    for part in parts:
        first = part.first[0]
        begin, end = max(slots.start - first, 0), min(slots.stop - first, part.k_hSD.shape[1])
        if begin < end:
            assert part.bias_hS is None  # what is held is as the model made it
            k_hSD, v_hSD = part.k_hSD[:, begin:end], part.v_hSD[:, begin:end]
            found.append(replace(part, first=[first + begin] * len(part.first), k_hSD=k_hSD, v_hSD=v_hSD))
    return found


def _raise(total_HGS: Tensor, part: Stretch, lse_HGT: Tensor, scale: float) -> None:
    lse_hGT = lse_HGT[part.heads]
    if part.offset_hGT is not None:
        lse_hGT = lse_hGT - part.offset_hGT * scale
    found_hGS = column_max(part.q_hGTD, part.k_hSD, lse_hGT, scale)
    if part.bias_hS is not None:
        found_hGS = found_hGS * part.bias_hS.exp().unsqueeze(1)
    for row_GS, first, found_GS in zip(total_HGS[part.heads], part.first, found_hGS, strict=True):
        mine_GS = row_GS[:, first : first + found_GS.shape[1]]
        torch.maximum(mine_GS, found_GS, out=mine_GS)
