"""Decode steps as captured CUDA graphs around the transformers module: one per number of lanes and tokens a lane.

Called operation by operation, an 8B model takes ten times the time its bytes need, to launch kernels; replayed, none.
A graph holds addresses, never lengths: what a step reads comes from tables that are rewritten between replays.
After some hundred steps the decoder layers are compiled as well, which fuses what stands between the matrix products.

    B lanes   T tokens of a lane   V vocabulary
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvfold.core import Compile
from kvfold.models.attach import layers_wrapped, maskless
from kvfold.models.fused_layers import fused
from kvfold.models.pass_cache import StepCache
from kvfold.pages.async_copy import sent, staged
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.batch_slots import BatchSlots, OutOfBatchSlots
from kvfold.passes.captured.block_tables import Layout
from kvfold.passes.captured.step import Step, layout_of

Tokens = Sequence[Sequence[int]] | Tensor  # of each sequence; or one each, [sequences], on the device
Compiler = Callable[[Callable[..., Any], int], Callable[..., Any]]  # (a layer's forward, rows) -> compiled forward
_COMPILE_AFTER = 512  # replayed steps that are worth the seconds of a compilation
_MOST_GRAPHS = 8
_MOST_FP32_QUERIES = 16  # of one KV head: fp32 has no tensor cores, and larger tiles of it take minutes to build
# One row: products become reductions, which fuse with what follows and reach the memory's bandwidth.
_ONE_ROW: dict[str, Any] = {"coordinate_descent_tuning": True}


class CudaGraphs:
    """The captured steps of one model; of too many, the least recently used goes."""

    def __init__(self) -> None:
        self.enabled = True
        self.captures = True  # on a GPU; tools that watch kernels want them launched one by one
        self.compile: Compile = "auto"
        self.setup_s = 0.0  # spent on capturing and compiling, in all
        self._steps = 0
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._compiled: dict[tuple[type[nn.Module], bool], Callable[..., Any]] = {}

    def decode(
        self, hf: Any, sequences: Sequence[SequenceCache], tokens: Tokens, *, stays: bool = True
    ) -> Tensor | None:
        """Logits [packed tokens, V] after each token of every sequence, which go to its open block, uncounted.

        None where the kernels do not serve the batch. Sequences have room for their tokens. The result is the
        caller's to keep. `stays`: every token is known to; what scorers observe of one cannot be taken back.
        """
        layout = layout_of(sequences[0]) if self.enabled else None
        if layout is None or any(layout_of(sequence) is not layout for sequence in sequences):
            return None
        if layout.observes and not stays:
            return None
        most = 1 if isinstance(tokens, Tensor) else max(map(len, tokens))
        shape = _bucket(len(sequences)), _bucket(most)
        if shape[1] > self.most_tokens(sequences[0]):
            return None
        key = id(layout), *shape  # one object for all layouts that are equal, held by what was captured
        captured = self._captured.pop(key, None)
        if captured is None or not self._serves(captured, sequences[0]):
            captured = self._capture(hf, layout, shape, sequences)
        try:
            logits = captured.run(hf, sequences, tokens)
        except OutOfBatchSlots:
            captured = self._capture(hf, layout, shape, sequences)
            logits = captured.run(hf, sequences, tokens)
        self._captured[key] = captured
        if layout.window:
            for sequence in sequences:
                sequence.observed.set_query_end(sequence.logical_len + 1)
        self._steps += 1
        return logits

    def most_tokens(self, sequence: SequenceCache) -> int:
        """Tokens of a sequence in one pass, beyond which the pass would be slower than captured steps one by one."""
        layout = layout_of(sequence) if self.enabled else None
        if layout is not None and layout.observes:
            return 1
        if layout is not None and layout.spec.dtype == torch.float32:
            return 1 << (_MOST_FP32_QUERIES // layout.spec.layers[0].group).bit_length() >> 1  # as buckets are
        return sys.maxsize

    def _serves(self, captured: _Captured, sequence: SequenceCache) -> bool:
        """Whether it reads the right arena and is as fast as it could be by now."""
        is_here = captured.lanes.memory is sequence.arena.memory
        return is_here and (captured.is_compiled or not self._wants_compiled)

    def forget(self) -> None:
        """Drop all graphs and the memory they hold."""
        self._captured.clear()

    @property
    def _wants_compiled(self) -> bool:
        return self._steps >= _COMPILE_AFTER if self.compile == "auto" else self.compile

    def _capture(
        self, hf: Any, layout: Layout, shape: tuple[int, int], sequences: Sequence[SequenceCache]
    ) -> _Captured:
        while len(self._captured) >= _MOST_GRAPHS:
            self._captured.pop(next(iter(self._captured)))
        num_lanes, num_tokens = shape
        lanes = BatchSlots(layout, sequences, num_lanes)
        graph = torch.cuda.CUDAGraph() if self.captures and lanes.memory.is_cuda else None
        captured = _Captured(lanes, num_tokens, graph, is_compiled=self._wants_compiled)
        began = time.perf_counter()
        captured.capture(hf, sequences, self._layer_forward)
        self.setup_s += time.perf_counter() - began
        return captured

    def _layer_forward(self, forward: Callable[..., Any], num_rows: int) -> Callable[..., Any]:
        """A decoder layer's forward, compiled; one compilation serves all layers of a class."""
        function, layer = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
        if function is None or not isinstance(layer, nn.Module):
            return forward  # somebody else has wrapped it
        key = type(layer), num_rows == 1
        if key not in self._compiled:
            options = _ONE_ROW if num_rows == 1 else None
            self._compiled[key] = torch.compile(function, dynamic=False, options=options)
        return partial(self._compiled[key], layer)


class _Captured:
    """One graph, or none: inputs in `inbox_BI` (token ids, positions, fill), logits in `logits_BTV`."""

    def __init__(
        self, lanes: BatchSlots, num_tokens: int, graph: torch.cuda.CUDAGraph | None, *, is_compiled: bool
    ) -> None:
        self.lanes, self.num_tokens, self.graph, self.is_compiled = lanes, num_tokens, graph, is_compiled
        self.inbox_BI = torch.zeros(lanes.num_lanes, 2 * num_tokens + 1, dtype=torch.int64, device=lanes.memory.device)
        self.inbox_BI[:, -1] = -1  # while it is captured, a step belongs to nobody and writes nothing
        self.logits_BTV: Tensor | None = None

    def capture(self, hf: Any, sequences: Sequence[SequenceCache], compiled: Compiler) -> None:
        """Run twice outside the graph first: kernels are built and libraries set up then."""
        self.lanes.place(sequences)
        if self.graph is None:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(hf, compiled)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph):
            self.logits_BTV = self._forward(hf, compiled)

    def run(self, hf: Any, sequences: Sequence[SequenceCache], tokens: Tokens) -> Tensor:
        lanes = self.lanes.place(sequences)
        is_packed = self.num_tokens == 1 and lanes == list(range(len(lanes)))  # rows are the tokens', in their order
        row_N = None if is_packed else sent(self._rows(lanes, tokens), self.inbox_BI.device)
        self._send(lanes, sequences, [] if isinstance(tokens, Tensor) else tokens)
        if isinstance(tokens, Tensor):
            self._put(tokens, row_N)
        if self.graph is None:
            self.logits_BTV = self._forward(hf, None)
        else:
            self.graph.replay()
        assert self.logits_BTV is not None
        logits_MV = self.logits_BTV.flatten(0, 1)
        rows_NV = logits_MV[: len(lanes)] if row_N is None else logits_MV.index_select(0, row_N)
        return rows_NV.to(torch.float32, copy=row_N is None)  # the next replay overwrites them

    def _rows(self, lanes: Sequence[int], tokens: Tokens) -> NDArray[np.int64]:
        """Where each of the packed tokens stands among those of all lanes."""
        lens = [1] * len(lanes) if isinstance(tokens, Tensor) else [len(ids) for ids in tokens]
        return np.concatenate([lane * self.num_tokens + np.arange(n) for lane, n in zip(lanes, lens, strict=True)])

    def _send(self, lanes: Sequence[int], sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> None:
        """Lanes without a sequence get fill -1; a draft that is shorter than T is padded, and its padding not read.
        Tokens of the device come later."""
        inbox_BI = np.zeros(self.inbox_BI.shape, dtype=np.int64)
        inbox_BI[:, -1] = -1
        fill_N = np.array([sequence.open.fill for sequence in sequences])
        start_N = np.array([sequence.sealed_len for sequence in sequences]) + fill_N
        inbox_BI[lanes, self.num_tokens : -1] = start_N[:, None] + np.arange(self.num_tokens)
        inbox_BI[lanes, -1] = fill_N
        if tokens:
            inbox_BI[lanes, : self.num_tokens] = [[*ids, *[0] * (self.num_tokens - len(ids))] for ids in tokens]
        self.inbox_BI.copy_(staged(inbox_BI, self.inbox_BI.device), non_blocking=True)

    def _put(self, token_B: Tensor, lane_B: Tensor | None) -> None:
        """Tokens that the host has not seen, one a lane."""
        if lane_B is None:
            self.inbox_BI[: len(token_B), 0].copy_(token_B)
        else:
            self.inbox_BI[:, 0].index_copy_(0, lane_B, token_B)

    def _forward(self, hf: Any, compiled: Compiler | None) -> Tensor:
        ids_BT, position_BT, fill_B1 = self.inbox_BI.split((self.num_tokens, self.num_tokens, 1), dim=1)
        cache = StepCache(Step(self.lanes, fill_B1.squeeze(1).to(torch.int32), self.num_tokens))

        def wrap(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            run = compiled(forward, ids_BT.numel()) if compiled is not None and self.is_compiled else forward

            def turn(*args: Any, **kwargs: Any) -> Any:
                cache.turn_to(index)
                return run(*args, **kwargs)

            return turn

        with maskless(), fused(hf), layers_wrapped(hf, wrap):
            out = hf(
                input_ids=ids_BT.reshape(1, -1),
                position_ids=position_BT.reshape(1, -1),
                past_key_values=cache,
                use_cache=True,
            )
        logits: Tensor = out.logits[0].unflatten(0, (self.lanes.num_lanes, self.num_tokens))
        return logits


_known: WeakKeyDictionary[nn.Module, CudaGraphs] = WeakKeyDictionary()


def cuda_graphs_of(hf: Any, compile: Compile = "auto") -> CudaGraphs:
    """The captured steps of a model, shared by all that run it."""
    found = _known.get(hf)
    if found is None:
        found = _known[hf] = CudaGraphs()
    found.compile = compile
    return found


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
