"""Decode steps as captured CUDA graphs around the transformers module: one per number of lanes and tokens a lane.

Called operation by operation, an 8B model takes ten times the time its bytes need, to launch kernels; replayed, none.
A graph holds addresses, never lengths: what a step reads comes from tables that are rewritten between replays.
After some hundred steps the decoder layers are compiled as well, which fuses what stands between the matrix products.

    B lanes   T tokens of a lane   V vocabulary
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kvfold.attend.kernels.step import Lanes, OutOfLanes, Step, layout_of
from kvfold.attend.kernels.tables import Layout
from kvfold.models.attach import layers_wrapped, maskless
from kvfold.models.step_cache import StepCache
from kvfold.pages.sequence import SequenceCache

Compile = Literal["auto"] | bool
_COMPILE_AFTER = 512  # replayed steps that are worth the seconds of a compilation
_MOST_GRAPHS = 8


class Graphs:
    """The captured steps of one model, least recently used last out."""

    def __init__(self) -> None:
        self.enabled = True
        self.compile: Compile = "auto"
        self.compile_s = 0.0  # what compiling has cost, in all
        self._steps = 0
        self._captured: dict[tuple[Layout, int, int], _Captured] = {}
        self._compiled: dict[type[nn.Module], Callable[..., Any]] = {}

    def decode(self, hf: Any, sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> Tensor | None:
        """Logits [packed tokens, V] after each token of every sequence, which go to its open block, uncounted.

        None where the kernels do not serve the batch. Sequences have room for their tokens. The result is the
        caller's to keep.
        """
        layout = layout_of(sequences[0]) if self.enabled else None
        if layout is None or any(layout_of(sequence) is not layout for sequence in sequences):
            return None
        shape = _bucket(len(sequences)), _bucket(max(len(ids) for ids in tokens))
        captured = self._captured.pop((layout, *shape), None)
        if captured is None or (self._wants_compiled and not captured.is_compiled):
            captured = self._capture(hf, layout, shape, sequences)
        try:
            logits = captured.run(hf, sequences, tokens)
        except OutOfLanes:
            captured = self._capture(hf, layout, shape, sequences)
            logits = captured.run(hf, sequences, tokens)
        self._captured[layout, *shape] = captured
        self._steps += 1
        return logits

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
        captured = _Captured(Lanes(layout, sequences, num_lanes), num_tokens, is_compiled=self._wants_compiled)
        began = time.perf_counter()
        with maskless(), self._fused(hf, captured.is_compiled):
            captured.capture(hf, sequences)
        self.compile_s += (time.perf_counter() - began) if captured.is_compiled else 0.0
        return captured

    @contextmanager
    def _fused(self, hf: Any, wanted: bool) -> Iterator[None]:
        """Decoder layers run compiled; one compilation serves all layers of a class."""
        if not wanted:
            yield
            return
        with layers_wrapped(hf, self._wrap), _shared_by_layers():
            yield

    def _wrap(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        function, layer = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
        if function is None or not isinstance(layer, nn.Module):
            return forward  # somebody else has wrapped it
        compiled = self._compiled.setdefault(type(layer), torch.compile(function, dynamic=False))
        return lambda *args, **kwargs: compiled(layer, *args, **kwargs)


class _Captured:
    """One graph: inputs in `inbox_BI` (token ids, positions, fill), logits in `logits_BTV`."""

    def __init__(self, lanes: Lanes, num_tokens: int, *, is_compiled: bool) -> None:
        self.lanes, self.num_tokens, self.is_compiled = lanes, num_tokens, is_compiled
        self.inbox_BI = torch.zeros(lanes.num_lanes, 2 * num_tokens + 1, dtype=torch.int64, device=lanes.memory.device)
        self.inbox_BI[:, -1] = -1  # while it is captured, a step belongs to nobody and writes nothing
        self.graph = torch.cuda.CUDAGraph() if lanes.memory.is_cuda else None
        self.logits_BTV: Tensor | None = None

    def capture(self, hf: Any, sequences: Sequence[SequenceCache]) -> None:
        """Run twice outside the graph first: kernels are built and libraries set up then."""
        self.lanes.place(sequences)
        if self.graph is None:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._forward(hf)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(self.graph):
            self.logits_BTV = self._forward(hf)

    def run(self, hf: Any, sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> Tensor:
        lanes = self.lanes.place(sequences)
        self._send(lanes, sequences, tokens)
        if self.graph is None:
            with maskless():
                self.logits_BTV = self._forward(hf)
        else:
            self.graph.replay()
        assert self.logits_BTV is not None
        rows = [lane * self.num_tokens + t for lane, ids in zip(lanes, tokens, strict=True) for t in range(len(ids))]
        return self.logits_BTV.flatten(0, 1).index_select(0, torch.tensor(rows, device=self.logits_BTV.device))

    def _send(
        self, lanes: Sequence[int], sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]
    ) -> None:
        """Lanes without a sequence get fill -1; a draft that is shorter than T is padded, and its padding not read."""
        rows = [[0] * (2 * self.num_tokens) + [-1] for _ in range(self.lanes.num_lanes)]
        for lane, sequence, ids in zip(lanes, sequences, tokens, strict=True):
            padding, start = [0] * (self.num_tokens - len(ids)), sequence.logical_len
            rows[lane] = [*ids, *padding, *range(start, start + self.num_tokens), sequence.open.fill]
        sent = torch.tensor(rows)
        self.inbox_BI.copy_(sent.pin_memory() if self.inbox_BI.is_cuda else sent, non_blocking=True)

    def _forward(self, hf: Any) -> Tensor:
        ids_BT, position_BT, fill_B1 = self.inbox_BI.split((self.num_tokens, self.num_tokens, 1), dim=1)
        step = Step(self.lanes, fill_B1.squeeze(1).to(torch.int32), self.num_tokens)
        out = hf(
            input_ids=ids_BT.reshape(1, -1),
            position_ids=position_BT.reshape(1, -1),
            past_key_values=StepCache(step),
            use_cache=True,
        )
        logits: Tensor = out.logits[0].float().unflatten(0, (self.lanes.num_lanes, self.num_tokens))
        return logits


_known: WeakKeyDictionary[nn.Module, Graphs] = WeakKeyDictionary()


def graphs_of(hf: Any) -> Graphs:
    """The captured steps of a model, shared by all that run it."""
    found = _known.get(hf)
    if found is None:
        found = _known[hf] = Graphs()
    return found


@contextmanager
def _shared_by_layers() -> Iterator[None]:
    """Layers differ in `layer_idx`, an int on the module: it must not make a compilation of its own for each."""
    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        yield


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
