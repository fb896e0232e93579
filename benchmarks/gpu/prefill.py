"""What does compressing add to a prefill on a GPU, in time and in peak memory?

    python -m benchmarks.gpu prefill [--lengths 8192,32768,131072] [--repeats 3] [--policies TEXT …] [--save]
                                     [--profile FOLDER] [--phases]

One prompt of random tokens on a random model of the Llama-3.1-8B shape, bf16. Systems take turns: transformers' own
prefill into a DynamicCache (sdpa), then kvfold's policies, each in an arena that just holds what it keeps. Peak memory
counts weights, arena and everything in between. The floor is the arithmetic of the prompt (weights and causal
attention) at the rate of a large matrix product measured here. `--phases` runs each policy once more and says how long
attention, observing, scoring, choosing, writing and the rest of the model take, on the device and on the host;
`--profile` writes the kernels, the host's calls and the stretches in which the device stood idle.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.commands import argument_parser
from benchmarks.gpu.common import clean, event_ms, llama, random_tokens, spread, timed
from benchmarks.gpu.fill import arena_bytes
from benchmarks.gpu.phases import Phases, gaps, prefill_phases
from benchmarks.rows import Row, report
from kvfold.engine.runner import Runner
from kvfold.models.attach import attach
from kvfold.pages.arena import Arena
from kvfold.policy.policy import Policy

BASE = "DynamicCache"
BASES = {"dynamic": BASE, "full": "full"}  # what added time is counted from
DEFAULT = ("full", "snapkv + ada + 8x", "expected + 8x")
POLICIES = {  # policy: tokens per slot that stays
    "full": 1,
    "snapkv + ada + 8x": 8,
    "expected + 8x": 8,
    "snapkv + 8x": 8,
    "snapkv + 8x + fastkv": 8,
}
Runs = dict[str, Callable[[], int]]  # system: its prefill, which returns the bytes it holds


@dataclass
class Measured:
    seconds: list[float]
    peak_bytes: int = 0
    held_bytes: int = 0


def dynamic(model: Any, tokens: list[int]) -> int:
    """transformers' own prefill; bytes of its cache."""
    cache = DynamicCache(config=model.config)
    ids = torch.tensor([tokens], device=model.device)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def folded(model: Any, policy: Policy, keep: int, tokens: list[int], chunk_len: int | None) -> int:
    """kvfold's prefill under a policy; bytes of its sequence."""
    with attach(model) as attached:
        capacity = arena_bytes(attached.spec, policy, -(-len(tokens) // keep))
        arena = Arena(capacity, device=model.device)
        runner = Runner(model, attached.spec, arena, chunk_len=chunk_len)
        sequence = runner.new_sequence(policy)
        runner.prefill([sequence], [tokens])
        return sequence.resident_bytes


def systems(model: Any, tokens: list[int], args: argparse.Namespace) -> Runs:
    runs: Runs = {BASE: lambda: dynamic(model, tokens)}
    chunk_len = args.chunk
    for text in args.policies:
        policy, keep = Policy.parse(text), POLICIES[text]
        runs[text] = lambda policy=policy, keep=keep: folded(model, policy, keep, tokens, chunk_len)  # type: ignore[misc]
    return runs


def warm_up(lengths: Sequence[int], args: argparse.Namespace) -> None:
    """Kernels and attention plans of every shape, at the price of one layer. Nothing of its model is left behind."""
    model = llama(num_hidden_layers=1)
    for length in lengths:
        for run in systems(model, random_tokens(length, model.config.vocab_size), args).values():
            run()


def measure(runs: Runs, repeats: int, num_warm: int) -> dict[str, Measured]:
    """Seconds and peak bytes, the systems taking turns. A first round takes memory from the driver, which is slow."""
    found = {name: Measured([]) for name in runs}
    torch.cuda.empty_cache()
    for round_ in range(num_warm + repeats):
        for name, run in runs.items():
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            ms, found[name].held_bytes = timed(run)
            found[name].seconds += [1e-3 * ms] if round_ >= num_warm else []
            found[name].peak_bytes = max(found[name].peak_bytes, torch.cuda.max_memory_allocated())
    return found


def rows_of(found: dict[str, Measured], length: int, floor_s: float) -> list[Row]:
    medians = {name: statistics.median(item.seconds) for name, item in found.items()}
    bases = {f"added_to_{key}_percent": medians[name] for key, name in BASES.items() if name in medians}
    rows: list[Row] = []
    for name, item in found.items():
        added = {key: 100 * (medians[name] / base - 1) for key, base in bases.items()}
        rows.append({
            "question": "prefill", "system": name, "length": length, **spread(item.seconds, "s"), **added,
            "peak_GB": item.peak_bytes / 1e9, "held_GB": item.held_bytes / 1e9,
            "floor_s": floor_s, "times_floor": medians[name] / floor_s,
        })  # fmt: skip
    return rows


def prompt_flops(config: Any, length: int) -> float:
    """Multiply-adds count two: decoder weights once a token, attention half of length x length."""
    heads, dim = config.num_attention_heads, config.head_dim
    projections = 2 * config.hidden_size * dim * (heads + config.num_key_value_heads)
    weights = config.num_hidden_layers * (projections + 3 * config.hidden_size * config.intermediate_size)
    attention = config.num_hidden_layers * 2 * heads * dim * length  # q.k and weight.v, halved by the causal mask
    return 2.0 * length * int(weights) + float(length) * int(attention)


def matmul_rate(size: int = 8192) -> float:
    """Floating-point operations a second of a large bf16 product."""
    a = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / (1e-3 * statistics.median(event_ms(lambda: a @ b, repeats=10)))


def profile(runs: Runs, folder: Path, length: int) -> None:
    """For each system, after the measurement: where the device stood idle, its kernels, and the host's calls."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, run in runs.items():
        with torch.profiler.profile() as found:
            run()
            torch.cuda.synchronize()
        idle = gaps(event for event in found.events() if event.device_type.name == "CUDA")
        lines = [f"idle {sum(us for us, _, _ in idle) / 1e3:.2f} ms in {sum(count for _, count, _ in idle)} gaps"]
        lines += [f"{us / 1e3:9.3f} ms  {count:5d} x  {names}" for us, count, names in idle[:40]]
        table = found.key_averages()
        lines += [table.table(sort_by=key, row_limit=40) for key in ("cuda_time_total", "self_cpu_time_total")]
        path = folder / f"prefill_{length}_{name.replace(' ', '').replace('+', '_')}.txt"
        path.write_text("\n".join(lines), encoding="utf-8")


def phase_rows(runs: Runs, length: int) -> list[Row]:
    """One more run of each policy, phase by phase."""
    rows: list[Row] = []
    for name in (name for name in runs if name != BASE):
        phases = Phases()
        with phases.watching(prefill_phases(Policy.parse(name))):
            runs[name]()
        device, host = phases.device_ms(), phases.host_ms()
        times = {f"{phase}_ms": ms for phase, ms in device.items()} | {f"{p}_host_ms": ms for p, ms in host.items()}
        rows.append({"question": "phases", "system": name, "length": length, **times})
    return rows


def measured(model: Any, length: int, args: argparse.Namespace, rate: float) -> Iterator[Row]:
    runs = systems(model, random_tokens(length, model.config.vocab_size), args)
    is_long = length > 32768
    found = measure(runs, 1 if is_long else args.repeats, num_warm=0 if is_long else 1)
    yield from rows_of(found, length, prompt_flops(model.config, length) / rate)
    if args.phases:
        yield from phase_rows(runs, length)
    if args.profile and args.lengths.startswith(str(length)):
        profile(runs, args.profile, length)


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("gpu prefill", __doc__)
    parser.add_argument("--lengths", default="8192,32768,131072")
    parser.add_argument("--repeats", type=int, default=3, help="of prompts up to 32768 tokens; longer ones run once")
    parser.add_argument("--policies", nargs="+", default=list(DEFAULT), choices=POLICIES, metavar="TEXT")
    parser.add_argument("--chunk", type=int, help="tokens a layer runs at a time (default: the runner's own)")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="also write profiler tables of the first length")
    parser.add_argument("--phases", action="store_true", help="also time the phases of each policy")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/gpu_prefill.jsonl")
    args = parser.parse_args(arguments)
    lengths = [int(length) for length in args.lengths.split(",")]
    rate = matmul_rate()
    warm_up(lengths, args)
    clean()
    model = llama(num_hidden_layers=args.layers)
    about = {"model": "Llama-3.1-8B shape", "layers": args.layers, "dtype": "bfloat16", "matmul_tflops": rate / 1e12}
    rows = (row for length in lengths for row in measured(model, length, args, rate))
    report("gpu_prefill", rows, save=args.save, chunk=args.chunk, **about)
