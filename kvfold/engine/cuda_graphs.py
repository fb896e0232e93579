"""CUDA graphs of decode steps around the transformers module, one per number of batch slots and of tokens per slot.

Launched kernel by kernel, a decode step of an 8B model takes ten times the time of its memory traffic; a replayed graph
has no launch overhead. A graph holds addresses, never lengths: a step reads block tables that are rewritten between
replays. After 512 steps the decoder layers are compiled as well, which fuses the operations between matrix products.

    B batch slots   T tokens of a slot   V vocabulary
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvfold.core import Compile
from kvfold.models.attach import ModuleState, layers_wrapped, maskless
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
_MOST_GRAPHS = 12  # a batch that grows from 1 to 256 slots uses nine
_MOST_FP32_QUERIES = 16  # of one KV head: fp32 has no tensor cores, and larger tiles of it take minutes to build
# One row: products become reductions, which fuse with what follows and reach the memory's bandwidth.
_ONE_ROW: dict[str, Any] = {"coordinate_descent_tuning": True}


class CudaGraphs:
    """The captured steps of one model, at most twelve; the least recently used is dropped (LRU)."""

    def __init__(self) -> None:
        self.enabled = True
        self.captures = True  # on CUDA; False for profilers that need kernels launched one by one
        self.compile: Compile = "auto"
        self.setup_s = 0.0  # of capture and compilation, in total
        self._steps = 0
        self._captured: dict[tuple[int, int, int], _Captured] = {}
        self._compiled: dict[tuple[type[nn.Module], bool], Callable[..., Any]] = {}

    def decode(
        self, hf: Any, sequences: Sequence[SequenceCache], tokens: Tokens, *, stays: bool = True
    ) -> Tensor | None:
        """Logits [packed tokens, V] after each token of every sequence. Keys and values are written to the open blocks,
        whose fill does not change yet.

        None where the kernels do not support the batch. Open blocks have room for the tokens. The result is not
        overwritten by later steps. `stays`: no token will be rejected; observations of a token cannot be undone.
        """
        layout = layout_of(sequences[0]) if self.enabled else None
        if layout is None or not _share(layout, sequences):
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
        """The most tokens of a sequence in one pass; with more, single captured steps are faster."""
        layout = layout_of(sequence) if self.enabled else None
        if layout is not None and layout.observes:
            return 1
        if layout is not None and layout.spec.dtype == torch.float32:
            return 1 << (_MOST_FP32_QUERIES // layout.spec.layers[0].group).bit_length() >> 1  # as buckets are
        return sys.maxsize

    def _serves(self, captured: _Captured, sequence: SequenceCache) -> bool:
        """Whether it was captured over this arena, and compiled if it should be by now."""
        is_here = captured.batch_slots.memory is sequence.arena.memory
        return is_here and (captured.is_compiled or not self._wants_compiled)

    def forget(self) -> None:
        """Drop all graphs and their memory."""
        self._captured.clear()

    @property
    def _wants_compiled(self) -> bool:
        return self._steps >= _COMPILE_AFTER if self.compile == "auto" else self.compile

    def _capture(
        self, hf: Any, layout: Layout, shape: tuple[int, int], sequences: Sequence[SequenceCache]
    ) -> _Captured:
        while len(self._captured) >= _MOST_GRAPHS:
            self._captured.pop(next(iter(self._captured)))
        num_slots, num_tokens = shape
        batch_slots = BatchSlots(layout, sequences, num_slots)
        graph = torch.cuda.CUDAGraph() if self.captures and batch_slots.memory.is_cuda else None
        captured = _Captured(batch_slots, num_tokens, graph, is_compiled=self._wants_compiled)
        began = time.perf_counter()
        captured.capture(hf, sequences, self._layer_forward)
        self.setup_s += time.perf_counter() - began
        return captured

    def _layer_forward(self, forward: Callable[..., Any], num_rows: int) -> Callable[..., Any]:
        """A decoder layer's compiled forward; one compilation serves all layers of a class."""
        function, layer = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
        if function is None or not isinstance(layer, nn.Module):
            return forward  # wrapped by other code
        key = type(layer), num_rows == 1
        if key not in self._compiled:
            options = _ONE_ROW if num_rows == 1 else None
            self._compiled[key] = torch.compile(function, dynamic=False, options=options)
        return partial(self._compiled[key], layer)


class _Captured:
    """One graph, or none: inputs in `inbox_BI` (token ids, positions, fill), logits in `logits_BTV`."""

    def __init__(
        self, batch_slots: BatchSlots, num_tokens: int, graph: torch.cuda.CUDAGraph | None, *, is_compiled: bool
    ) -> None:
        self.batch_slots, self.num_tokens, self.graph, self.is_compiled = batch_slots, num_tokens, graph, is_compiled
        shape, device = (batch_slots.num_lanes, 2 * num_tokens + 1), batch_slots.memory.device
        self.inbox_BI = torch.zeros(shape, dtype=torch.int64, device=device)
        self.inbox_BI[:, -1] = -1  # fill -1: no sequence, so a step writes nothing during capture
        self.logits_BTV: Tensor | None = None

    def capture(self, hf: Any, sequences: Sequence[SequenceCache], compiled: Compiler) -> None:
        """Two warm-up runs outside the graph build kernels and initialise libraries."""
        self.batch_slots.place(sequences)
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
        slots = self.batch_slots.place(sequences)
        is_packed = self.num_tokens == 1 and slots == list(range(len(slots)))  # rows are the tokens', in their order
        row_N = None if is_packed else sent(self._rows(slots, tokens), self.inbox_BI.device)
        self._send(slots, sequences, [] if isinstance(tokens, Tensor) else tokens)
        if isinstance(tokens, Tensor):
            self._put(tokens, row_N)
        if self.graph is None:
            self.logits_BTV = self._forward(hf, None)
        else:
            self.graph.replay()
        assert self.logits_BTV is not None
        logits_MV = self.logits_BTV.flatten(0, 1)
        rows_NV = logits_MV[: len(slots)] if row_N is None else logits_MV.index_select(0, row_N)
        return rows_NV.to(torch.float32, copy=row_N is None)  # the next replay overwrites them

    def _rows(self, slots: Sequence[int], tokens: Tokens) -> NDArray[np.int64]:
        """Rows of the packed tokens among those of all slots."""
        lens = [1] * len(slots) if isinstance(tokens, Tensor) else [len(ids) for ids in tokens]
        return np.concatenate([slot * self.num_tokens + np.arange(n) for slot, n in zip(slots, lens, strict=True)])

    def _send(self, slots: Sequence[int], sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> None:
        """Slots without a sequence get fill -1; drafts shorter than T are padded; device-side tokens come later."""
        inbox_BI = np.zeros(self.inbox_BI.shape, dtype=np.int64)
        inbox_BI[:, -1] = -1
        fill_N = np.array([sequence.open.fill for sequence in sequences])
        start_N = np.array([sequence.sealed_len for sequence in sequences]) + fill_N
        inbox_BI[slots, self.num_tokens : -1] = start_N[:, None] + np.arange(self.num_tokens)
        inbox_BI[slots, -1] = fill_N
        if tokens:
            inbox_BI[slots, : self.num_tokens] = [[*ids, *[0] * (self.num_tokens - len(ids))] for ids in tokens]
        self.inbox_BI.copy_(staged(inbox_BI, self.inbox_BI.device), non_blocking=True)

    def _put(self, token_B: Tensor, slot_B: Tensor | None) -> None:
        """Copy device-side tokens, one per slot."""
        if slot_B is None:
            self.inbox_BI[: len(token_B), 0].copy_(token_B)
        else:
            self.inbox_BI[:, 0].index_copy_(0, slot_B, token_B)

    def _forward(self, hf: Any, compiled: Compiler | None) -> Tensor:
        ids_BT, position_BT, fill_B1 = self.inbox_BI.split((self.num_tokens, self.num_tokens, 1), dim=1)
        cache = StepCache(Step(self.batch_slots, fill_B1.squeeze(1).to(torch.int32), self.num_tokens))

        def wrap(index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            run = compiled(forward, ids_BT.numel()) if compiled is not None and self.is_compiled else forward

            def turn(*args: Any, **kwargs: Any) -> Any:
                cache.layer = index
                return run(*args, **kwargs)

            return turn

        with maskless(), fused(hf), layers_wrapped(hf, wrap):
            out = hf(
                input_ids=ids_BT.reshape(1, -1),
                position_ids=position_BT.reshape(1, -1),
                past_key_values=cache,
                use_cache=True,
            )
        logits: Tensor = out.logits[0].unflatten(0, (self.batch_slots.num_lanes, self.num_tokens))
        return logits


def _share(layout: Layout, sequences: Sequence[SequenceCache]) -> bool:
    """Whether it is the layout of all; without shifts and windows it never changes, and is looked up at once."""
    if layout.shifts or layout.window:
        return all(layout_of(sequence) is layout for sequence in sequences)
    found = (sequence.derived.get("layout") is layout or layout_of(sequence) is layout for sequence in sequences)
    return all(found)


_graphs: ModuleState[CudaGraphs] = ModuleState("cuda_graphs")


def cuda_graphs_of(hf: Any, compile: Compile = "auto") -> CudaGraphs:
    """The CUDA graphs of a model, shared by all its runners."""
    found = _graphs.get(hf) or _graphs.set(hf, CudaGraphs())
    found.compile = compile
    return found


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
