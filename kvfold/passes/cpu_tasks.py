"""Tasks of compiled decode attention on a CPU (attend/cpu_kernels.py): where the slots of every layer and head lie.

A sequence's tasks stay the same until it seals or evicts: only the open block grows, by one slot a step. So they are
kept with the sequence, and those of a batch with its first sequence, for as long as the batch stays the same.

    N tasks   L layers   B sequences   H KV heads   R rows (B * H)   D head dim
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import is_
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from kvfold.attend.cpu_kernels import BF16, F32, FP8, INT2, INT4, INT8, K_CODE, LENGTH, NUM_COLUMNS, ROW
from kvfold.codec.base import Side
from kvfold.codec.hadamard import CentredCodec
from kvfold.core import ModelSpec
from kvfold.pages.layout import PageClass
from kvfold.pages.open_block import OpenBlock
from kvfold.pages.places import COLUMNS, Ints, SegmentTable
from kvfold.pages.segment import segment_table
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.split_kv import LaneTables, cut

_SPLIT = 256  # slots of a task
_FLOATS = {torch.float32: F32, torch.bfloat16: BF16}
_INTEGERS = {8: INT8, 4: INT4, 2: INT2}
_PARTS = 8  # for each thread
_FEWEST_SLOTS = 1024  # of a layer that are worth waking another thread


@cache
def forms_of(page_class: PageClass) -> tuple[int, int] | None:
    """Keys and values as kernels know them; None where attention needs PyTorch."""
    if page_class.reader.selects or page_class.group > 1 or page_class.needs_below:
        return None
    if page_class.k_width is not None or page_class.v_width is not None:
        return None
    k, v = _form(page_class, "k"), _form(page_class, "v")
    return None if k is None or v is None else (k, v)


def _form(page_class: PageClass, side: Side) -> int | None:
    codec, fields = page_class.codec(side), {item.name: item for item in page_class.fields}
    if codec.as_floats:
        return _FLOATS.get(fields[f"{side}.x"].dtype)
    if codec.kernel is None or not isinstance(codec, CentredCodec) or fields[f"{side}.scale"].width > 1:
        return None
    return FP8 if codec.kernel.form == "fp8" else _INTEGERS.get(codec.kernel.bits)


def is_served(sequence: SequenceCache) -> bool:
    """Whether kernels can read the sequence: its layers are alike, and nothing but codes and biases bears on scores."""
    spec = sequence.spec
    shapes = {(layer.num_kv_heads, layer.num_query_heads, layer.head_dim) for layer in spec.layers}
    if len(shapes) > 1 or spec.kv_dtype not in _FLOATS:
        return False
    if sequence.policy.position.shifts or sequence.offloaded is not None:
        return False
    return all(forms_of(pages.page_class) is not None for pages in sequence.tail.layers)


@dataclass(frozen=True, eq=False)
class SequenceTasks:
    """The tasks of a sequence, layer by layer and head by head; those of the open block have length 0."""

    made_of: tuple[object, ...]  # the page tables and the open block
    num_sinks: int
    layer_N: Ints
    task_NC: Ints
    open_N: NDArray[np.bool_]
    is_coded_L: NDArray[np.bool_]
    mean_LHD: NDArray[np.float32]  # of keys that are centred
    place_SLH: Ints  # byte addresses of the open block, keys and values

    def holds(self, made_of: tuple[object, ...], num_sinks: int) -> bool:
        """Whether no slot was sealed or moved since."""
        return num_sinks == self.num_sinks and _are_same(made_of, self.made_of)


def _are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def tasks_of(sequence: SequenceCache, num_shared: int = 0) -> SequenceTasks:
    """The same object until slots are sealed or evicted. `num_shared`: segments that are read elsewhere
    (cpu_cascade.py)."""
    own = (*sequence.segments[num_shared:], sequence.tail)
    tables = tuple(segment_table(segment) for segment in own)
    num_sinks = 0 if sequence.fp_sinks is None else sequence.fp_sinks.fill
    known: SequenceTasks | None = sequence.derived.get("cpu_tasks")
    if known is None or not known.holds((*tables, sequence.open), num_sinks):
        known = sequence.derived["cpu_tasks"] = _build(sequence, tables, num_sinks)
    return known


def _build(sequence: SequenceCache, tables: tuple[SegmentTable, ...], num_sinks: int) -> SequenceTasks:
    spec, layers = sequence.spec, sequence.tail.layers
    sinks_L = np.array([sequence.num_fp_sinks(layer) for layer in range(spec.num_layers)])
    stored = cut([LaneTables(0, tables, sinks_L=sinks_L)], np.full(spec.num_layers, _SPLIT))
    forms = [forms_of(pages.page_class) or (F32, F32) for pages in layers]
    task_NC = np.zeros((len(stored.length_N), NUM_COLUMNS), dtype=np.int64)
    task_NC[:, ROW], task_NC[:, LENGTH], task_NC[:, LENGTH + 1] = stored.head_N, stored.length_N, stored.skip_N
    task_NC[:, K_CODE - 2 : K_CODE] = np.array(forms)[stored.layer_N]
    task_NC[:, K_CODE:] = stored.address_NF[:, : len(COLUMNS)]
    parts, found = [task_NC], [stored.layer_N]
    if sequence.fp_sinks is not None and num_sinks:
        sink_NC = _block_tasks(sequence.fp_sinks, spec)
        sink_NC[:, LENGTH] = np.repeat(sinks_L, spec.layers[0].num_kv_heads)
        parts.append(sink_NC)
    parts.append(_block_tasks(sequence.open, spec))
    layer_X = np.repeat(np.arange(spec.num_layers), spec.layers[0].num_kv_heads)
    found += [layer_X] * (len(parts) - 1)
    layer_N, task_NC = np.concatenate(found), np.concatenate(parts)
    is_open_N = np.arange(len(layer_N)) >= len(layer_N) - len(layer_X)
    order_N = np.lexsort((task_NC[:, ROW], layer_N))
    return SequenceTasks(
        (*tables, sequence.open),
        num_sinks,
        layer_N[order_N],
        task_NC[order_N],
        is_open_N[order_N],
        np.array([k >= FP8 for k, _ in forms]),
        np.stack([_mean(sequence, layer) for layer in range(spec.num_layers)]),
        parts[-1][:, [K_CODE, K_CODE + 3]].T.reshape(2, spec.num_layers, -1),
    )


def _block_tasks(block: OpenBlock, spec: ModelSpec) -> Ints:
    """A task for each head of each layer of an open block, or of full-precision sinks."""
    num_heads, slot_bytes = spec.layers[0].num_kv_heads, spec.layers[0].head_dim * spec.kv_dtype.itemsize
    head_X = np.tile(np.arange(num_heads), spec.num_layers)
    task_XC = np.zeros((len(head_X), NUM_COLUMNS), dtype=np.int64)
    task_XC[:, ROW] = head_X
    task_XC[:, K_CODE - 2 : K_CODE] = _FLOATS[spec.kv_dtype]
    address_X2 = block.addresses.repeat(num_heads, axis=0) + (head_X * block.num_slots * slot_bytes)[:, None]
    task_XC[:, K_CODE], task_XC[:, K_CODE + 3] = address_X2.T
    return task_XC


def _mean(sequence: SequenceCache, layer: int) -> NDArray[np.float32]:
    """[H, D]; segments of a sequence share codec states."""
    spec, state = sequence.spec.layers[layer], sequence.tail.layers[layer].state.get("k", {})
    if "mean" not in state:
        return np.zeros((spec.num_kv_heads, spec.head_dim), dtype=np.float32)
    found: NDArray[np.float32] = state["mean"].float().numpy()
    return found


@dataclass(eq=False)
class BatchTasks:
    """The tasks of some sequences, by layer and row; lengths of open blocks are set for every step."""

    parts: list[SequenceTasks]
    num_threads: int
    task_NC: Ints
    open_N: Ints  # which of them are open blocks: layer by layer, row by row
    first_L: Ints  # task of each layer, and the end
    start_LX: Ints  # in each layer, the first task of every row, and the end
    cut_LX: Ints  # in each layer, where the parts begin that threads take, and the end
    is_coded_LB: NDArray[np.bool_]
    mean_LBHD: NDArray[np.float32]
    place_SLBH: Ints

    @classmethod
    def over(cls, parts: list[SequenceTasks], num_threads: int) -> BatchTasks:
        num_layers, num_heads = parts[0].mean_LHD.shape[:2]
        layer_N = np.concatenate([part.layer_N for part in parts])
        task_NC = np.concatenate([part.task_NC for part in parts])
        task_NC[:, ROW] += num_heads * np.repeat(np.arange(len(parts)), [len(part.layer_N) for part in parts])
        row_N = layer_N * num_heads * len(parts) + task_NC[:, ROW]
        order_N = np.argsort(row_N, kind="stable")
        task_NC, row_N = np.ascontiguousarray(task_NC[order_N]), row_N[order_N]
        num_rows = num_heads * len(parts)
        start_X = np.searchsorted(row_N, np.arange(num_layers * num_rows + 1))
        first_L = start_X[::num_rows]
        layers = [slice(first, last) for first, last in pairwise(first_L)]
        inside = num_rows * np.arange(num_layers)[:, None] + np.arange(num_rows + 1)
        return cls(
            parts,
            num_threads,
            task_NC,
            np.flatnonzero(np.concatenate([part.open_N for part in parts])[order_N]),
            first_L,
            start_X[inside] - first_L[:-1, None],
            np.stack([_shared_out(task_NC[layer, LENGTH], num_threads) for layer in layers]),
            np.stack([part.is_coded_L for part in parts], axis=1),
            np.stack([part.mean_LHD for part in parts], axis=1),
            np.stack([part.place_SLH for part in parts], axis=2),
        )

    def holds(self, parts: Sequence[SequenceTasks], num_threads: int) -> bool:
        return num_threads == self.num_threads and _are_same(parts, self.parts)

    def of_layer(self, layer: int) -> Ints:
        return self.task_NC[self.first_L[layer] : self.first_L[layer + 1]]

    def set_open(self, fill_B: Sequence[int]) -> None:
        """Lengths of the open blocks."""
        num_layers, num_heads = self.parts[0].mean_LHD.shape[:2]
        self.task_NC[self.open_N, LENGTH] = np.tile(np.repeat(fill_B, num_heads), num_layers)


def _shared_out(length_N: Ints, num_threads: int) -> Ints:
    """Where parts of the tasks begin, and the end: about as many slots for each, or, of few, all in the first."""
    end_N, num_parts = np.cumsum(length_N + 16), _PARTS * num_threads  # an open block, and what a task costs
    inner_X = np.searchsorted(end_N, end_N[-1] * np.arange(1, num_parts) / num_parts)
    if num_threads == 1 or end_N[-1] < _FEWEST_SLOTS:
        inner_X[:] = len(length_N)
    return np.concatenate([[0], inner_X, [len(length_N)]])


def batch_tasks(
    sequences: Sequence[SequenceCache], num_threads: int, num_shared: Mapping[int, int] = MappingProxyType({})
) -> BatchTasks:
    """Of the sequences of a step, each of which has room for a new slot in its open block; `num_shared`: by their
    number, segments that are read elsewhere."""
    parts = [tasks_of(sequence, num_shared.get(index, 0)) for index, sequence in enumerate(sequences)]
    known: BatchTasks | None = sequences[0].derived.get("cpu_batch")
    if known is None or not known.holds(parts, num_threads):
        known = sequences[0].derived["cpu_batch"] = BatchTasks.over(parts, num_threads)
    known.set_open([sequence.open.fill + 1 for sequence in sequences])
    return known
