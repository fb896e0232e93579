"""How many sequences of 32k tokens fit on one GPU at 8x in int4, and how fast do they decode together?

    python benchmarks/gpu_capacity.py [--length 32768] [--batch 256] [--steps 20] [--save]

A random model of the Llama-3.1-8B shape, bf16. Sequences of ragged head lengths (mean length / 8) are laid into an
arena over all memory that weights leave, until it is full; the first `--batch` of them hold random slots and decode
together through the runner. The peer in the same run is transformers' DynamicCache: how many sequences its bytes
allow, with how many it still makes a step, and its tokens a second there. Floors are bytes over copy bandwidth.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import DynamicCache

from benchmarks.gpu_common import Row, copy_bandwidth, event_ms, floor_ms, kv_bytes, llama, report, spread, weight_bytes
from benchmarks.gpu_fill import describe, fill, head_lengths
from kvfold.engine.runner import Runner
from kvfold.errors import OutOfPages
from kvfold.models.attach import attach
from kvfold.pages.arena import Arena
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.stats import measure

POLICY = "snapkv + ada + 8x + int4"
KEPT = 8  # tokens per slot that stays


def dynamic_step(model: Any, batch: int, length: int) -> Callable[[], object]:
    """One step of the unmodified model over an ordinary cache of random keys and values."""
    cache, config = DynamicCache(config=model.config), model.config
    shape = (batch, config.num_key_value_heads, length, config.head_dim)
    for index in range(config.num_hidden_layers):
        k, v = (torch.randn(shape, device=model.device, dtype=model.dtype) for _ in "kv")
        cache.update(k, v, index)
        del k, v
    tokens = torch.full((batch, 1), 5, device=model.device)

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=tokens, past_key_values=cache, use_cache=True)

    return step


def dynamic_rows(model: Any, length: int, free_bytes: int, bandwidth: float) -> list[Row]:
    """Batches that still make a step, the last being the most of these that fit."""
    rows: list[Row] = []
    for batch in (8, 16, 24, 28):
        try:
            step = dynamic_step(model, batch, length)
            times = event_ms(step, repeats=5)
        except torch.cuda.OutOfMemoryError:
            break
        finally:
            step = None  # type: ignore[assignment]
            gc.collect()
            torch.cuda.empty_cache()
        floor = floor_ms(weight_bytes(model) + batch * kv_bytes(length, model.config), bandwidth)
        held = kv_bytes(length, model.config)
        rows.append(decode_row("DynamicCache", length, batch, held, times, floor) | {"fits": free_bytes // held})
    return rows


def decode_row(system: str, length: int, batch: int, held: float, times: list[float], floor: float) -> Row:
    median = statistics.median(times)
    return {
        "question": "capacity", "system": system, "length": length, "batch": batch, "MB_each": held / 1e6,
        **spread(times, "ms"), "tokens_per_s": 1e3 * batch / median, "floor_ms": floor, "times_floor": median / floor,
    }  # fmt: skip


def add_sequence(runner: Runner, policy: Policy, length: int, seed: int, *, write: bool) -> SequenceCache | None:
    """A sequence with head lengths of its own seed, of random slots or of pages only taken; None: no room."""
    layers = runner.spec.layers
    lengths = head_lengths(len(layers), layers[0].num_kv_heads, length // KEPT, length, seed)
    if seed == 0:
        print(f"head lengths, seed 0: {describe(lengths)}")
    try:
        sequence = runner.new_sequence(policy)
    except OutOfPages:
        return None
    try:
        if write:
            fill(sequence, lengths, length, seed)
        else:
            sequence.tail.reserve(lengths)
    except OutOfPages:
        sequence.release()
        return None
    return sequence


def add_sequences(
    runner: Runner, policy: Policy, length: int, seeds: Iterable[int], *, write: bool
) -> list[SequenceCache]:
    """One for each seed, until the arena is full."""
    found: list[SequenceCache] = []
    for seed in seeds:
        sequence = add_sequence(runner, policy, length, seed, write=write)
        if sequence is None:
            break
        found.append(sequence)
    return found


def steps_ms(step: Callable[[], object], steps: int, limit_s: float = 20.0) -> list[float]:
    """Milliseconds of up to `steps` steps, three at least, after two to warm up."""
    found, began = event_ms(step, repeats=3), time.perf_counter()
    while len(found) < steps and time.perf_counter() - began < limit_s:
        found += event_ms(step, repeats=1, warm_up=0)
    return found


def folded_row(model: Any, args: argparse.Namespace, bandwidth: float) -> Row:
    policy = Policy.parse(POLICY)
    with attach(model) as attached:
        capacity = torch.cuda.mem_get_info()[0] - int(1e9 * args.spare)
        runner = Runner(model, attached.spec, Arena(capacity, device=model.device), compile=True)
        sequences = add_sequences(runner, policy, args.length, range(args.batch), write=True)
        stats = [measure(sequence) for sequence in sequences]
        tokens = [5] * len(sequences)
        times = steps_ms(lambda: runner.decode(sequences, tokens).argmax(-1).tolist(), args.steps)
        more = add_sequences(runner, policy, args.length, count(len(sequences)), write=False)
    held = statistics.mean(stat.resident_bytes for stat in stats)
    floor = floor_ms(weight_bytes(model) + sum(stat.bytes_per_step for stat in stats), bandwidth)
    row = decode_row(f"kvfold {POLICY}", args.length, len(sequences), held, times, floor)
    return row | {"fits": len(sequences) + len(more), "arena_GB": capacity / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=256, help="sequences that decode together")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--spare", type=float, default=6.0, metavar="GB", help="memory left out of the arena")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/gpu_capacity.jsonl")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    torch.cuda.empty_cache()
    model = llama(num_hidden_layers=args.layers)
    free_bytes = torch.cuda.mem_get_info()[0]
    rows = dynamic_rows(model, args.length, free_bytes, bandwidth)
    rows.append(folded_row(model, args, bandwidth))
    about = {"model": "Llama-3.1-8B shape", "layers": args.layers, "dtype": "bfloat16", "bandwidth": bandwidth}
    report("gpu_capacity", rows, save=args.save, **about)


if __name__ == "__main__":
    main()
