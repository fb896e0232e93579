"""How long does one decode step take on a CPU, and what does compressing add to a prefill?

    python -m benchmarks.cpu_decode [POLICY ...] [--model smollm2-135m] [--dtype auto] [--lengths 1000,8000]
                                    [--prefill 8000] [--batch 16]

Caches are filled with random keys and values of the given length, compressed by the policy itself, so that no long
prefill has to run first; steps then go through the whole model. The baseline is transformers' DynamicCache on the same
weights, measured in the same run, interleaved with the others. The floor is the bytes a step reads (weights without the
input embedding, and stored slots) over the copy bandwidth measured here.

With `--batch`, a step decodes one token for each of so many sequences, whose lengths are spread by a fifth about the
given one, by compiled kernels and, in turn, in PyTorch alone; DynamicCache has as many rows of the longest length. CPU
seconds are told beside the time, for machines that others use too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import DynamicCache

import kvfold
from benchmarks.rows import append_row, facts, percentile
from kvfold.compression.round import CompressionRound
from kvfold.compression.view import NewSlots
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.stats import measure

POLICIES = (
    "full", "int8", "int4", "snapkv + 8x", "snapkv + ada + 8x", "snapkv + 8x + int4", "snapkv + ada + 8x + int4",
)  # fmt: skip
BATCHED = ("full", "int4", "keydiff + 4x", "keydiff + 4x + int4", "keydiff + ada + 4x + int4")


def filled(runner: Runner, policy: str, length: int) -> SequenceCache:
    """A sequence of random slots under a policy, as a prefill would have left it."""
    sequence = runner.new_sequence(kvfold.Policy.parse(policy))
    generator = torch.Generator().manual_seed(0)
    sequence.observed.set_query_end(length)
    compression = CompressionRound(sequence, sequence.policy.prefill, length)
    for index, layer in enumerate(runner.spec.layers):
        shape = (layer.num_kv_heads, length, layer.head_dim)
        k, v = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        q = torch.randn(layer.num_query_heads, 64, layer.head_dim, generator=generator)
        sequence.observed.layers[index].last_q_QWD = q
        compression.add_layer(index, NewSlots(k, v, 0))
        sequence.observed.layers[index].last_q_QWD = None
    compression.finish(length)
    return sequence


def dynamic_step(model: Model, length: int, batch: int = 1) -> Callable[[], object]:
    """The baseline: one step of the unmodified model with a DynamicCache of `length` tokens."""
    cache = DynamicCache(config=model.hf.config)
    for index, layer in enumerate(model.spec.layers):
        shape = (batch, layer.num_kv_heads, length, layer.head_dim)
        cache.update(torch.randn(shape, dtype=model.spec.dtype), torch.randn(shape, dtype=model.spec.dtype), index)
    token = torch.full((batch, 1), 5)

    def step() -> None:
        with torch.inference_mode():
            model.hf(input_ids=token, past_key_values=cache, use_cache=True)

    return step


def timed(steps: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds per step, the systems taking turns, after two warm-up rounds."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(repeats + 2):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if round_ >= 2:
                found[name].append(1e3 * (time.perf_counter() - began))
    return found


def decode(model: Model, policies: Sequence[str], lengths: list[int], repeats: int) -> list[dict[str, object]]:
    runner = Runner(model.hf, model.spec, model.arena)
    bandwidth = copy_bandwidth()
    embedding = model.hf.get_input_embeddings().weight
    tied = model.hf.get_output_embeddings().weight.data_ptr() == embedding.data_ptr()
    weights = sum(p.nbytes for p in model.hf.parameters()) - (0 if tied else embedding.nbytes)
    rows = []
    for length in lengths:
        sequences = {policy: filled(runner, policy, length) for policy in policies}
        steps: dict[str, Callable[[], object]] = {"DynamicCache": dynamic_step(model, length)}
        for policy, sequence in sequences.items():
            steps[policy] = partial(runner.decode, [sequence], [5])
        times = timed(steps, repeats)
        base = statistics.median(times["DynamicCache"])
        for name, values in times.items():
            stats = measure(sequences[name]) if name in sequences else None
            read = stats.bytes_per_step if stats else model.spec.full_bytes(length) // 2 * model.spec.dtype.itemsize
            median = statistics.median(values)
            rows.append({
                "question": "decode step", "system": name, "length": length, "ms": median,
                "ms_p20": percentile(values, 20), "ms_p80": percentile(values, 80), "to_dynamic": median / base,
                "floor_ms": 1e3 * (weights + read) / bandwidth, "kv_bytes_read": read,
                "resident_bytes": stats.resident_bytes if stats else model.spec.full_bytes(length),
            })  # fmt: skip
        for sequence in sequences.values():
            sequence.release()
    return rows


def in_torch(step: Callable[[], object]) -> None:
    """Without compiled kernels."""
    with (
        mock.patch("kvfold.passes.decode.HAS_NUMBA", False),
        mock.patch("kvfold.engine.forward.few_rows", nullcontext),
        mock.patch("kvfold.engine.forward.compiled_layers", nullcontext),
    ):
        step()


def batched(model: Model, policies: Sequence[str], length: int, batch: int, repeats: int) -> list[dict[str, object]]:
    """Steps of many sequences; the systems take turns."""
    runner = Runner(model.hf, model.spec, model.arena)
    lens = [length * (90 + 20 * i // max(1, batch - 1)) // 100 for i in range(batch)]
    caches = {policy: [filled(runner, policy, mine) for mine in lens] for policy in policies}
    step = dynamic_step(model, max(lens), batch)
    steps = {("DynamicCache", "transformers"): step}
    for policy, sequences in caches.items():
        steps[policy, "kernels"] = step = partial(runner.decode, sequences, [5] * batch)
        steps[policy, "torch"] = partial(in_torch, step)
    times: dict[tuple[str, str], list[tuple[float, float]]] = {key: [] for key in steps}
    for round_ in range(repeats + 1):
        for key, step in steps.items():
            began, began_cpu = time.perf_counter(), time.process_time()
            step()
            if round_:
                times[key].append((time.perf_counter() - began, time.process_time() - began_cpu))
    rows: list[dict[str, object]] = []
    for (policy, by), values in times.items():
        ms, cpu_ms = ([1e3 * value for value in column] for column in zip(*values, strict=True))
        held = sum(sequence.resident_bytes for sequence in caches.get(policy, ()))
        rows.append({
            "question": "batched decode step", "system": policy, "by": by, "length": length, "batch": batch,
            "ms": statistics.median(ms), "ms_least": min(ms), "cpu_ms_least": min(cpu_ms),
            "tokens_per_s": 1e3 * batch / statistics.median(ms), "resident_bytes": held,
        })  # fmt: skip
    for sequence in (sequence for sequences in caches.values() for sequence in sequences):
        sequence.release()
    return rows


def prefill(model: Model, length: int, repeats: int) -> list[dict[str, object]]:
    """Seconds to read `length` random tokens, policies taking turns."""
    tokens = torch.randint(0, model.spec.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    policies = ("full", "snapkv + 8x", "snapkv + ada + 8x")
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    for _ in range(repeats):
        for policy in policies:
            with kvfold.Session(model, policy) as session:
                began = time.perf_counter()
                session.extend(tokens)
                times[policy].append(time.perf_counter() - began)
    base = statistics.median(times["full"])
    return [
        {"question": "prefill", "system": policy, "length": length, "s": statistics.median(values),
         "to_full": statistics.median(values) / base}
        for policy, values in times.items()
    ]  # fmt: skip


def copy_bandwidth() -> float:
    """Bytes per second read by a large sum on this machine, the best of five."""
    block = torch.ones(64 * 1024 * 1024)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        block.sum()
        best = max(best, block.nbytes / (time.perf_counter() - began))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="of decode steps")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--lengths", default="1000,8000", help='of the caches, by commas; "" times no decode steps')
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--prefill", type=int, default=0, metavar="TOKENS", help="also time a prefill of this length")
    parser.add_argument("--batch", type=int, default=1, metavar="SEQUENCES", help="that a step decodes at once")
    parser.add_argument("--threads", type=int, help="of PyTorch; default: its own choice")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/cpu_decode.jsonl")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    model = kvfold.load(args.model, dtype=args.dtype, device="cpu")
    lengths = [int(length) for length in args.lengths.split(",") if length]
    if args.batch > 1:
        chosen = args.policies or BATCHED
        rows = [row for length in lengths for row in batched(model, chosen, length, args.batch, args.repeats)]
    else:
        rows = decode(model, args.policies or POLICIES, lengths, args.repeats)
    if args.prefill:
        rows += prefill(model, args.prefill, repeats=3)
    about = facts(model=args.model, dtype=str(model.spec.dtype), kv_dtype=str(model.spec.kv_dtype))
    for row in rows:
        print("  ".join(f"{key} {value:.3f}" if isinstance(value, float) else f"{value}" for key, value in row.items()))
        if args.save:
            append_row("cpu_decode", {**row, **about})
    print(json.dumps({"rows": rows, **about}))


if __name__ == "__main__":
    main()
