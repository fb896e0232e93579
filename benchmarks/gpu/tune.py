"""Which tile, warps, stages and number of tasks make the decode kernel fastest for each codec?

    python -m benchmarks.gpu tune [--slots 131072,1048576] [--codecs bf16,fp8,int8,int4,int2] [--seconds 80] [--save]

One layer of the Llama-3.1-8B shape (8 KV heads of 128, 4 queries each) whose heads share `slots` log-normally, as
budgets across heads leave them: 131072 is 128k tokens at 8x, 1048576 all of them. A run reads several copies of the
layer in turn, more than the chip's cache holds. Bytes are those of codes, scales and zeros; the ceiling is a
device-to-device copy, measured in the same run and counted read plus written. Configurations (tile/warps/stages
[/registers], x tasks per processor) are compiled by several processes first; none is started after `--seconds`. With
each codec's best: the merge alone, and the whole of a step (query transform, tasks, merge).
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.commands import argument_parser
from benchmarks.gpu.common import copy_bandwidth, graph_ms
from benchmarks.rows import Row, report
from kvfold.attend.kernels import decode, merge
from kvfold.attend.kernels.decode import Config
from kvfold.attend.kernels.formats import K_CODE, LENGTH, NUM_COLUMNS, QUERY, V_CODE, format_of

NUM_HEADS, HEAD_DIM, NUM_QUERIES = 8, 128, 4
SCALE = HEAD_DIM**-0.5
CACHE_BYTES = 256 << 20  # what the copies of a layer come to at least: several times the L2 of an H200
ALIGNMENT = 128  # slots
TASKS_PER_PROCESSOR = (4, 8, 16, 24)
OPEN_LEN = 32

CONFIGS: dict[str, list[Config]] = {
    "bf16": [
        Config(64, 4, 3), Config(64, 4, 4), Config(32, 2, 4), Config(32, 2, 5), Config(64, 2, 3), Config(32, 1, 4),
        Config(128, 4, 3),
    ],
    "fp8": [Config(64, 4, 3, 128), Config(64, 2, 3), Config(64, 4, 4), Config(32, 1, 4), Config(128, 4, 3)],
    "int8": [Config(64, 4, 3, 128), Config(64, 4, 3), Config(64, 2, 3), Config(64, 2, 4, 128), Config(32, 1, 4)],
    "int4": [
        Config(64, 2, 3, 128), Config(64, 2, 3), Config(64, 2, 4), Config(64, 1, 3), Config(32, 1, 4), Config(64, 1, 4),
        Config(128, 4, 3),
    ],
    "int2": [Config(64, 1, 3), Config(64, 1, 5), Config(32, 1, 4), Config(32, 1, 6), Config(128, 2, 4)],
}  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """Copies of one layer in one piece of memory, each with its table of tasks."""

    codec: str
    q_RXD: Tensor
    memory: Tensor
    tables: list[Tensor]
    task_range: Tensor
    num_bytes: int  # that one copy reads
    open_address: Tensor
    fill: Tensor
    state: dict[str, Tensor]

    def attend(self, table: Tensor, config: Config) -> tuple[Tensor, Tensor]:
        common = (self.q_RXD, None, self.memory, table, None, self.codec, self.codec, 1, 1)
        return decode.launch(*common, SCALE, config=config)

    def merge(self, parts: tuple[Tensor, Tensor]) -> None:
        """With an open block half full, which lies over codes of the first copy: what it holds takes no time."""
        merge.launch(
            *parts, self.task_range, self.q_RXD, self.q_RXD[None, :, :1], self.q_RXD[None, :, :1], self.memory,
            self.open_address, self.fill, OPEN_LEN, self.open_address, self.fill, 0, "bf16", SCALE,
        )  # fmt: skip

    def step(self, table: Tensor, config: Config) -> None:
        q_RXD, offset_RX = format_of(self.codec).codec.query(self.q_RXD, self.state)
        common = (q_RXD.contiguous(), offset_RX, self.memory, table, None, self.codec, self.codec, 1, 1)
        self.merge(decode.launch(*common, SCALE, config=config))


def head_lens(slots: int) -> list[int]:
    """Whole tiles; the same for every codec."""
    share_R = torch.randn(NUM_HEADS, generator=torch.Generator().manual_seed(0)).exp()
    return [max(1, round(slots * float(share) / ALIGNMENT)) * ALIGNMENT for share in share_R / share_R.sum()]


def make_layers(codec: str, slots: int, num_copies: int | None = None) -> dict[int, Layer]:
    """By tasks per processor, over the same memory. Random codes or floats; metadata that keep scores small."""
    form, lens = format_of(codec), head_lens(slots)
    width = form.width(HEAD_DIM) * form.dtype.itemsize
    num_meta = {"float": 0, "fp8": 1, "int": 2}[form.form]
    per_slot, total = 2 * (width + 2 * num_meta), sum(lens)
    copies = num_copies or max(2, -(-CACHE_BYTES // (per_slot * total)))
    parts = [_side(form.form, copies * total, width, num_meta) for _ in range(2)]
    starts = torch.tensor([0, *(part.numel() for side in parts for part in side)]).cumsum(0).tolist()
    memory = torch.cat([part for side in parts for part in side])
    q_RXD = torch.randn(NUM_HEADS, NUM_QUERIES, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    open_address = torch.zeros(1, 2, dtype=torch.int64, device="cuda")
    fill = torch.full((1,), OPEN_LEN // 2, dtype=torch.int32, device="cuda")
    state = {"mean": torch.zeros(NUM_HEADS, HEAD_DIM, device="cuda")}
    layers = {}
    for per_processor in TASKS_PER_PROCESSOR:
        rows = torch.tensor(_rows(lens, per_processor))
        tables = [_table(rows, starts, copy * total, width, num_meta) for copy in range(copies)]
        end_R = torch.bincount(rows[:, 0], minlength=NUM_HEADS).cumsum(0)
        task_range = torch.stack((torch.cat((torch.zeros(1), end_R[:-1])), end_R), dim=-1).to("cuda", torch.int32)
        layers[per_processor] = Layer(
            codec, q_RXD, memory, tables, task_range, per_slot * total, open_address, fill, state
        )
    return layers


def _side(form: str, num_slots: int, width: int, num_meta: int) -> list[Tensor]:
    """Codes, then scales, then zeros of all slots, as bytes."""
    if form == "float":
        codes = torch.randn(num_slots * width // 2, dtype=torch.bfloat16, device="cuda").view(torch.uint8)
    else:  # below 120 a byte is a finite e4m3 float
        codes = torch.randint(0, 120 if form == "fp8" else 256, (num_slots * width,), dtype=torch.uint8, device="cuda")
    meta = [torch.rand(num_slots, device="cuda").mul_(0.01).bfloat16().view(torch.uint8) for _ in range(num_meta)]
    return [codes, *meta]


def _rows(lens: Sequence[int], per_processor: int) -> list[tuple[int, int, int]]:
    """(head, first slot, length) of each task."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    split = max(1, -(-sum(lens) // (processors * per_processor * ALIGNMENT))) * ALIGNMENT
    found, start = [], 0
    for head, length in enumerate(lens):
        found += [(head, start + at, min(split, length - at)) for at in range(0, length, split)]
        start += length
    return found


def _table(rows: Tensor, starts: list[int], first: int, width: int, num_meta: int) -> Tensor:
    table = torch.zeros(len(rows), NUM_COLUMNS, dtype=torch.int64)
    table[:, QUERY], table[:, LENGTH] = rows[:, 0], rows[:, 2]
    for side, column in enumerate((K_CODE, V_CODE)):
        for nth, stride in enumerate((width, *[2] * num_meta)):
            table[:, column + nth] = starts[side * (1 + num_meta) + nth] + (first + rows[:, 1]) * stride
    return table.cuda()


def compile_one(codec: str, config: Config) -> None:
    """Leave the kernels in triton's cache on disk."""
    layer = make_layers(codec, 8 * ALIGNMENT, num_copies=1)[TASKS_PER_PROCESSOR[0]]
    layer.merge(layer.attend(layer.tables[0], config))
    torch.cuda.synchronize()


def compile_all(codecs: Sequence[str]) -> None:
    jobs = [(codec, config) for codec in codecs for config in CONFIGS[codec]]
    with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
        for future in [pool.submit(compile_one, *job) for job in jobs]:
            future.result()


def timed_us(layer: Layer, run: Callable[[Tensor], object]) -> float:
    """Microseconds of one run, over the copies in turn."""
    turn = cycle(layer.tables)
    return 1e3 * graph_ms(lambda: run(next(turn)), repeats=10, inner=len(layer.tables) * 2)


def measured(layer: Layer, config: Config, bandwidth: float) -> Row:
    us = timed_us(layer, lambda table: layer.attend(table, config))
    rate = layer.num_bytes / us * 1e6
    return {"us": us, "gb_s": rate / 1e9, "percent_of_copy": 100 * rate / bandwidth}


def best_row(layer: Layer, config: Config, bandwidth: float) -> Row:
    """The best of the sweep again, with the merge alone and the whole step."""
    parts = layer.attend(layer.tables[0], config)
    merge_us = timed_us(layer, lambda _: layer.merge(parts))
    step_us = timed_us(layer, lambda table: layer.step(table, config))
    return {**measured(layer, config, bandwidth), "merge_us": merge_us, "step_us": step_us}


def sweep(codec: str, slots: int, bandwidth: float, deadline: float) -> Iterator[Row]:
    layers = make_layers(codec, slots)
    found: list[tuple[float, int, Config]] = []
    for config in CONFIGS[codec]:
        for tasks, layer in layers.items():
            if time.monotonic() < deadline:
                row = measured(layer, config, bandwidth)
                found.append((row["us"], tasks, config))
                yield {"kind": "attend", "codec": codec, "slots": slots, "config": _shown(config, tasks), **row}
    if found:
        _, tasks, config = min(found, key=lambda item: item[0])
        row = best_row(layers[tasks], config, bandwidth)
        yield {"kind": "best", "codec": codec, "slots": slots, "config": _shown(config, tasks), **row}


def _shown(config: Config, tasks: int) -> str:
    return "/".join(str(value) for value in config if value is not None) + f" x {tasks}"


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("gpu tune", __doc__)
    parser.add_argument("--slots", default="131072,1048576")
    parser.add_argument("--codecs", default=",".join(CONFIGS))
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args(arguments)
    codecs, begin = options.codecs.split(","), time.monotonic()
    compile_all(codecs)
    print(f"compiled after {time.monotonic() - begin:.0f} s")
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    for slots in map(int, options.slots.split(",")):
        for codec in codecs:
            rows += sweep(codec, slots, bandwidth, begin + options.seconds)
            torch.cuda.empty_cache()
    rows.sort(key=lambda row: row["kind"] == "best")  # for people, what matters comes last
    report("gpu_tune", rows, save=options.save, copy_gb_s=bandwidth / 1e9, seconds=time.monotonic() - begin)
