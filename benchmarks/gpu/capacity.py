"""How many sequences of 32k tokens fit on one GPU at 8x in int4, and how fast do they decode together?

    python -m benchmarks.gpu capacity [--length 32768] [--batch 256] [--steps 64] [--save]

A random model of the Llama-3.1-8B shape, bf16, and an arena over all memory that weights leave. Eight sequences of
ragged head lengths (mean length / 8, a seed each) are encoded; all others are copies of these in pages of their own.
`--batch` of them decode together through the runner, seals and greedy sampling included; then more are added until the
arena is full. The peer in the same run is transformers' DynamicCache: how many sequences its bytes allow, with how many
it still makes a step, and its tokens a second there. Floors are bytes over copy bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from benchmarks.commands import argument_parser
from benchmarks.gpu.common import clean, copy_bandwidth, floor_ms, kv_bytes, llama, weight_bytes
from benchmarks.gpu.decode import dynamic_ms, mode_ms, speeds
from benchmarks.gpu.fill import copied, describe, filled, head_lengths, open_bytes, slot_bytes
from benchmarks.rows import Row, report
from kvfold.engine.runner import Runner
from kvfold.models.attach import attach
from kvfold.pages.arena import Arena
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

POLICY = "snapkv + ada + 8x + int4"
KEPT = 8  # tokens per slot that stays
SEEDS = 8  # sequences that are encoded; the others are copies
PEER_BATCHES = (16, 24, 28)


def dynamic_rows(model: Any, length: int, bandwidth: float) -> Iterator[Row]:
    """Batches that still make a step; the largest of these that fits comes last."""
    free_bytes, held = torch.cuda.mem_get_info()[0], kv_bytes(length, model.config)
    for batch in PEER_BATCHES:
        ms = dynamic_ms(model, length, batch)
        if ms is None:
            return
        floor, kv_floor = (floor_ms(batch * held + more, bandwidth) for more in (weight_bytes(model), 0))
        row = {"system": "DynamicCache", "MB_each": held / 1e6, "fits": free_bytes // held}
        yield {**about(length, batch), **row, **speeds([ms], batch, floor, kv_floor)}


def about(length: int, batch: int) -> Row:
    return {"question": "capacity", "length": length, "batch": batch}


def encoded(runner: Runner, policy: Policy, length: int) -> Iterator[SequenceCache]:
    """Sequences with head lengths of a seed each."""
    layers = runner.spec.layers
    for seed in range(SEEDS):
        lengths = head_lengths(len(layers), layers[0].num_kv_heads, length // KEPT, length, seed)
        if seed == 0:
            print(f"head lengths, seed 0: {describe(lengths)}")
        yield filled(runner, policy, lengths, length, seed)


def copies(sources: Sequence[SequenceCache], most: int | None = None) -> Iterator[SequenceCache]:
    """Copies of the sources in turn, until the arena is full."""
    for source in islice(cycle(sources), most):
        found = copied(source)
        if found is None:
            return
        yield found


def folded_row(model: Any, args: argparse.Namespace, bandwidth: float) -> Row:
    policy = Policy.parse(POLICY)
    capacity = torch.cuda.mem_get_info()[0] - int(1e9 * args.spare)
    with attach(model) as attached:
        runner = Runner(model, attached.spec, Arena(capacity, device=model.device))
        sources = list(encoded(runner, policy, args.length))  # they are held, too, but never decode: copies stay short
        held = statistics.mean(sequence.resident_bytes for sequence in sources)
        batch = list(copies(sources, args.batch))
        stored = slot_bytes(batch) + open_bytes(batch)
        values = mode_ms(runner, batch, "compiled", args.steps)
        more = list(copies(sources))
    floors = (floor_ms(stored + weights, bandwidth) for weights in (weight_bytes(model), 0))
    return {
        **about(args.length, len(batch)), "system": f"kvfold {POLICY}", "MB_each": held / 1e6,
        "fits": len(sources) + len(batch) + len(more), "arena_GB": capacity / 1e9,
        **speeds(values, len(batch), *floors), "setup_s": runner.setup_s,
    }  # fmt: skip


def measured(model: Any, args: argparse.Namespace, bandwidth: float) -> Iterator[Row]:
    yield from dynamic_rows(model, args.length, bandwidth)
    yield folded_row(model, args, bandwidth)


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("gpu capacity", __doc__)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=256, help="sequences that decode together")
    parser.add_argument("--steps", type=int, default=64, help="decode steps timed")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--spare", type=float, default=6.0, metavar="GB", help="memory left out of the arena")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/gpu_capacity.jsonl")
    args = parser.parse_args(arguments)
    bandwidth = copy_bandwidth()
    clean()
    model = llama(num_hidden_layers=args.layers)
    facts = {"model": "Llama-3.1-8B shape", "layers": args.layers, "dtype": "bfloat16", "bandwidth": bandwidth}
    report("gpu_capacity", measured(model, args, bandwidth), save=args.save, **facts)
