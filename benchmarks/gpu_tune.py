"""Which tile, warps and stages make the decode kernel fastest for each codec, and how close is it to a plain copy?

    python benchmarks/gpu_tune.py [--slots 131072,524288] [--codecs bf16,fp8,int8,int4,int2] [--seconds 80] [--save]

One layer of the Llama-3.1-8B shape (8 KV heads of 128, 4 queries each) whose heads share `slots` log-normally, as
budgets across heads leave them. A run reads several copies of the layer in turn, more than the chip's cache holds.
Bytes are those of codes, scales and zeros; the ceiling is a device-to-device copy, measured in the same run and counted
read plus written. Configurations are compiled by several processes first; none is started after `--seconds`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_common import Row, copy_bandwidth, graph_ms, report
from kvfold.attend.kernels import decode
from kvfold.attend.kernels.decode import Config
from kvfold.attend.kernels.formats import K_CODE, LENGTH, NUM_COLUMNS, QUERY, V_CODE, format_of

NUM_HEADS, HEAD_DIM, NUM_QUERIES = 8, 128, 4
CACHE_BYTES = 256 << 20  # what the copies of a layer come to at least: several times the L2 of an H200
ALIGNMENT = 128  # slots
TASKS_PER_PROCESSOR = 4

CONFIGS: dict[str, list[Config]] = {
    "bf16": [Config(64, 4, 3), Config(64, 4, 4), Config(128, 4, 3), Config(128, 8, 3), Config(32, 4, 4)],
    "fp8": [Config(128, 8, 3, 128), Config(128, 4, 3), Config(64, 4, 4), Config(128, 4, 3, 168)],
    "int8": [Config(128, 8, 3, 128), Config(128, 4, 3), Config(64, 4, 4), Config(128, 4, 3, 168)],
    "int4": [
        Config(128, 8, 4, 128), Config(128, 4, 4), Config(128, 4, 4, 168), Config(64, 4, 4), Config(256, 8, 3),
        Config(128, 8, 4),
    ],
    "int2": [
        Config(128, 8, 4, 128), Config(128, 4, 4), Config(128, 4, 4, 168), Config(256, 8, 3), Config(256, 8, 4),
    ],
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """Copies of one layer in one piece of memory, each with its table of tasks."""

    codec: str
    q_RXD: Tensor
    memory: Tensor
    tables: list[Tensor]
    num_tasks: Tensor
    num_bytes: int  # that one copy reads

    def run(self, table: Tensor, config: Config | None) -> None:
        common = (self.q_RXD, None, self.memory, table, self.num_tasks, self.codec, self.codec, 1, 1)
        decode.launch(*common, HEAD_DIM**-0.5, config=config)


def head_lens(slots: int) -> list[int]:
    """Whole tiles; the same for every codec."""
    share_R = torch.randn(NUM_HEADS, generator=torch.Generator().manual_seed(0)).exp()
    return [max(1, round(slots * float(share) / ALIGNMENT)) * ALIGNMENT for share in share_R / share_R.sum()]


def make_layer(codec: str, slots: int, num_copies: int | None = None) -> Layer:
    """Random codes, or random floats; scales and zeros that keep scores small."""
    form, lens = format_of(codec), head_lens(slots)
    width = form.width(HEAD_DIM) * form.dtype.itemsize
    num_meta = {"float": 0, "fp8": 1, "int": 2}[form.form]
    per_slot, total = 2 * (width + 2 * num_meta), sum(lens)
    copies = num_copies or max(2, -(-CACHE_BYTES // (per_slot * total)))
    parts = [_side(form.form, copies * total, width, num_meta) for _ in range(2)]
    starts = torch.tensor([0, *(part.numel() for side in parts for part in side)]).cumsum(0).tolist()
    memory = torch.cat([part for side in parts for part in side])
    rows = _rows(lens)
    tables = [_table(rows, starts, copy * total, width, num_meta) for copy in range(copies)]
    q_RXD = torch.randn(NUM_HEADS, NUM_QUERIES, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    num_tasks = torch.tensor([len(rows)], dtype=torch.int32, device="cuda")
    return Layer(codec, q_RXD, memory, tables, num_tasks, per_slot * total)


def _side(form: str, num_slots: int, width: int, num_meta: int) -> list[Tensor]:
    """Codes, then scales, then zeros of all slots, as bytes."""
    if form == "float":
        codes = torch.randn(num_slots * width // 2, dtype=torch.bfloat16, device="cuda").view(torch.uint8)
    else:  # below 120 a byte is a finite e4m3 float
        codes = torch.randint(0, 120 if form == "fp8" else 256, (num_slots * width,), dtype=torch.uint8, device="cuda")
    meta = [torch.rand(num_slots, device="cuda").mul_(0.01).bfloat16().view(torch.uint8) for _ in range(num_meta)]
    return [codes, *meta]


def _rows(lens: Sequence[int]) -> list[tuple[int, int, int]]:
    """(head, first slot, length) of each task: a few for every processor."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    split = max(1, -(-sum(lens) // (processors * TASKS_PER_PROCESSOR * ALIGNMENT))) * ALIGNMENT
    found, start = [], 0
    for head, length in enumerate(lens):
        found += [(head, start + at, min(split, length - at)) for at in range(0, length, split)]
        start += length
    return found


def _table(rows: list[tuple[int, int, int]], starts: list[int], first: int, width: int, num_meta: int) -> Tensor:
    table = torch.zeros(len(rows), NUM_COLUMNS, dtype=torch.int64)
    for i, (head, at, length) in enumerate(rows):
        table[i, QUERY], table[i, LENGTH] = head, length
        for side, column in enumerate((K_CODE, V_CODE)):
            for nth, stride in enumerate((width, *[2] * num_meta)):
                table[i, column + nth] = starts[side * (1 + num_meta) + nth] + (first + at) * stride
    return table.cuda()


def compile_one(codec: str, config: Config) -> None:
    """Leave the kernel in triton's cache on disk."""
    layer = make_layer(codec, 8 * ALIGNMENT, num_copies=1)
    layer.run(layer.tables[0], config)
    torch.cuda.synchronize()


def measure(layer: Layer, config: Config, bandwidth: float, **about: object) -> Row:
    turn = cycle(layer.tables)
    ms = graph_ms(lambda: layer.run(next(turn), config), inner=len(layer.tables) * 4)
    rate = layer.num_bytes / ms * 1e3
    shown = "/".join(str(value) for value in config if value is not None)
    speed = {"us": ms * 1e3, "gb_s": rate / 1e9, "of_copy": rate / bandwidth}
    return {"codec": layer.codec, **about, "config": shown, **speed}


def compile_all(codecs: Sequence[str]) -> None:
    jobs = [(codec, config) for codec in codecs for config in CONFIGS[codec]]
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compile_one, *job) for job in jobs]:
            future.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", default="131072,524288")
    parser.add_argument("--codecs", default=",".join(CONFIGS))
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    codecs, begin = options.codecs.split(","), time.monotonic()
    compile_all(codecs)
    bandwidth, rows = copy_bandwidth(), []
    for codec in codecs:
        for slots in map(int, options.slots.split(",")):
            layer = make_layer(codec, slots)
            for config in CONFIGS[codec]:
                if time.monotonic() - begin < options.seconds:
                    rows.append(measure(layer, config, bandwidth, slots=slots))
    report("gpu_tune", rows, save=options.save, copy_gb_s=bandwidth / 1e9, seconds=time.monotonic() - begin)


if __name__ == "__main__":
    main()
