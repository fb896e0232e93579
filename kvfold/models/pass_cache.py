"""The transformers `Cache` of one forward: `update` hands new keys and values to the running pass.

It stores nothing. `update` returns a handle in place of the keys; the attention function of attach.py calls its
`attend` with the queries. For calibration, `kv_gradients` finds keys, values and the gradient of the loss by each.

    H KV heads   Q query heads   N packed tokens   T tokens   D head dim
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache as HfCache

from kvfold.passes.captured.step import Step
from kvfold.passes.decode import DecodePass
from kvfold.passes.prefill import PrefillPass
from kvfold.yielding import yield_point


class Pass(Protocol):
    """A pass that runs the tokens of a batch piece by piece: prefill, replay, self-study."""

    def attend(self, layer: int, index: int, q_QTD: Tensor, k_HTD: Tensor, v_HTD: Tensor) -> Tensor:
        """The next tokens of sequence `index`; returns the attention output [Q, T, D]."""


@dataclass(frozen=True)
class Piece:
    """Tokens begin:end of the packed input, all of one sequence."""

    index: int
    begin: int
    end: int


class ForwardCache(HfCache):  # type: ignore[misc]
    """Without layers: the pass knows earlier tokens, so masks cover new tokens only."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.angles: tuple[Tensor, Any, Any] | None = None  # of compiled layers: cosines, and both as arrays
        self.has_run = False  # all layers, in one call (cpu_decoder.py)
        self.num_wanted: int | None = None  # last rows of a call whose outputs are used; a layer may give these alone

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        return _Keys(self, layer_idx, key_states[0], value_states[0]), None

    def attend(self, layer: int, q_QND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
        """The attention output [N, Q, D] of all packed tokens."""
        raise NotImplementedError

    def all_layers(self) -> Any:
        """What kernels need to run all layers in one call, where they can (`Decoder.run` in cpu_decoder.py)."""
        return None

    def take_layer(self, layer: int) -> None:
        """Of layers that ran in one call, this one would be through now."""


@dataclass
class _Keys:
    cache: ForwardCache
    layer: int
    k_HND: Tensor
    v_HND: Tensor

    def attend(self, query: Tensor, mask: Tensor | None) -> Tensor:
        return self.cache.attend(self.layer, query[0], self.k_HND, self.v_HND).unsqueeze(0)


class PassCache(ForwardCache):
    """For a pass that runs piece by piece (chunked prefill, replay, self-study)."""

    def __init__(self, current: Pass, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.current = current
        self.pieces = list(pieces)  # the part of the packed input that the next call of a layer covers

    def attend(self, layer: int, q_QND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
        base = self.pieces[0].begin
        outs = []
        for piece in self.pieces:
            yield_point()
            mine = slice(piece.begin - base, piece.end - base)
            outs.append(self.current.attend(layer, piece.index, q_QND[:, mine], k_HND[:, mine], v_HND[:, mine]))
        out_QND = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        return out_QND.transpose(0, 1)


class PrefillCache(PassCache):
    """For a prefill, in which several short prompts may go through a layer in one call."""

    def __init__(self, current: PrefillPass, pieces: Sequence[Piece]) -> None:
        super().__init__(current, pieces)
        self._prefill = current

    def attend(self, layer: int, q_QND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
        if len(self.pieces) > 1:
            yield_point()
            lens = [piece.end - piece.begin for piece in self.pieces]
            indices = [piece.index for piece in self.pieces]
            out_QND = self._prefill.attend_joined(layer, indices, lens, q_QND, k_HND, v_HND)
            if out_QND is not None:
                return out_QND.transpose(0, 1)
        return super().attend(layer, q_QND, k_HND, v_HND)

    def all_layers(self) -> Any:
        yield_point()
        lens = [piece.end - piece.begin for piece in self.pieces]
        return self._prefill.all_layers([piece.index for piece in self.pieces], lens)

    def take_layer(self, layer: int) -> None:
        self._prefill.take_layer(layer)


Call = Callable[[Sequence[int], Sequence[int], PassCache], Any]  # the model over token ids at positions


class DecodeCache(ForwardCache):
    """For a decode step, which runs the tokens of all sequences at once."""

    def __init__(self, step: DecodePass) -> None:
        super().__init__()
        self.step = step

    def attend(self, layer: int, q_QND: Tensor, k_HND: Tensor, v_HND: Tensor) -> Tensor:
        return self.step.attend_packed(layer, q_QND, k_HND, v_HND)

    def all_layers(self) -> Any:
        return self.step.all_layers()


class StepCache(ForwardCache):
    """For a captured decode step.

    The wrapper of the layers sets the running layer (`layer`): with the index that the model passes, a compiled
    layer would be recompiled for every value of it.
    """

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.layer = 0

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        return _StepKeys(self, key_states, value_states), None


@dataclass
class _StepKeys:
    cache: StepCache
    key_states: Tensor  # [1, H, N, D]
    value_states: Tensor

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, query: Tensor, mask: Tensor | None) -> Tensor:
        """Excluded from torch.compile: its operators write to the arena, which a compiler would copy."""
        step, layer = self.cache.step, self.cache.layer
        return step.attend(layer, query[0], self.key_states[0], self.value_states[0]).unsqueeze(0)


_LEAST = 2  # tokens: the first predicts the second


class KVGradients(NamedTuple):
    """Of one layer, as they would be cached."""

    k_HTD: Tensor
    v_HTD: Tensor
    by_k_HTD: Tensor  # d loss / d k
    by_v_HTD: Tensor


class _GradientCache(ForwardCache):
    """Returns keys and values plus zeros that require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[Tensor, Tensor]] = {}
        self.zeros: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        self.found[layer_idx] = key_states, value_states
        zero_k, zero_v = (torch.zeros_like(x, requires_grad=True) for x in (key_states, value_states))
        self.zeros[layer_idx] = zero_k, zero_v
        return key_states + zero_k, value_states + zero_v


def kv_gradients(hf: Any, ids: Sequence[int]) -> dict[int, KVGradients]:
    """By layer, for a text of at least two tokens; the loss is the sum of -log p of its tokens."""
    assert len(ids) >= _LEAST
    inputs, cache = torch.tensor([list(ids)], device=hf.device), _GradientCache()
    positions = torch.arange(len(ids), device=hf.device).unsqueeze(0)
    with torch.enable_grad():
        logits = hf(inputs, past_key_values=cache, position_ids=positions, use_cache=True).logits[0, :-1]
        loss = functional.cross_entropy(logits.float(), inputs[0, 1:], reduction="sum")
        zeros = [zero for pair in cache.zeros.values() for zero in pair]
        by = iter(torch.autograd.grad(loss, zeros))
    return {
        layer: KVGradients(k[0].detach(), v[0].detach(), next(by)[0], next(by)[0])
        for layer, (k, v) in cache.found.items()
    }
