"""What the runner gives the model as its cache: `update` hands the new keys and values to the pass that is running.

    H KV heads   N packed tokens   D head dim
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvfold.attend.decode import DecodePass
from kvfold.attend.prefill import PrefillPass
from kvfold.attend.replay import ReplayPass
from kvfold.attend.study import StudyPass
from kvfold.models.forward_cache import ForwardCache
from kvfold.yielding import yield_point


@dataclass(frozen=True)
class Piece:
    """Tokens begin:end of the packed input, all of one sequence."""

    index: int
    begin: int
    end: int


class PassCache(ForwardCache):
    """For a pass that reads piece after piece."""

    def __init__(self, current: PrefillPass | ReplayPass | StudyPass, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.current = current
        self.pieces = list(pieces)  # the part of the packed input that the next call of a layer covers

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return PassHandle(self, layer_idx, key_states[0], value_states[0]), None


@dataclass
class PassHandle:
    cache: PassCache
    layer: int
    k_HND: Tensor
    v_HND: Tensor

    def attend(self, query: Tensor, mask: Tensor | None) -> Tensor:
        base = self.cache.pieces[0].begin
        outs = []
        for piece in self.cache.pieces:
            yield_point()
            mine = slice(piece.begin - base, piece.end - base)
            new = query[0, :, mine], self.k_HND[:, mine], self.v_HND[:, mine]
            outs.append(self.cache.current.attend(self.layer, piece.index, *new))
        out_QND = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out_QND.transpose(0, 1).unsqueeze(0)


Call = Callable[[Sequence[int], Sequence[int], PassCache], Any]  # the model over token ids at positions


class DecodeCache(ForwardCache):
    """For a decode step, which takes the tokens of all sequences at once."""

    def __init__(self, step: DecodePass) -> None:
        super().__init__()
        self.step = step

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return DecodeHandle(self.step, layer_idx, key_states[0], value_states[0]), None


@dataclass
class DecodeHandle:
    step: DecodePass
    layer: int
    k_HND: Tensor
    v_HND: Tensor

    def attend(self, query: Tensor, mask: Tensor | None) -> Tensor:
        return self.step.attend_packed(self.layer, query[0], self.k_HND, self.v_HND).unsqueeze(0)
