"""How near does a decode step come to the time its bytes need?

    python benchmarks/gpu_decode.py [attention] [step] [--context 131072x1,32768x16] [--save]

`attention`: the two kernels alone, over pages of unequal heads that hold as many bytes as the dense cache would,
against SDPA over a dense cache of the same bytes. `step`: a model of the Llama-3.1-8B shape with random weights over a
cache of an eighth of the context, under heads of unequal and of equal lengths: called operation by operation, captured,
compiled, and with attention left out, against transformers with DynamicCache (the whole context, sdpa).

Floors are bytes a step touches (weights without the input embedding, stored slots with their metadata, the open block)
over the copy bandwidth measured in the same run. Random weights attend evenly, so head lengths are imposed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import DynamicCache

from benchmarks.gpu_common import (
    Row,
    copy_bandwidth,
    event_ms,
    floor_ms,
    graph_ms,
    llama,
    report,
    spread,
    weight_bytes,
)
from benchmarks.gpu_fill import Lengths, arena_bytes, describe, fill, head_lengths
from kvfold.attend.kernels.lanes import Lanes
from kvfold.attend.kernels.step import Step, layout_of
from kvfold.engine.graphs import graphs_of
from kvfold.engine.runner import Runner
from kvfold.models.attach import attach
from kvfold.pages.arena import Arena
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

KEEP = 8  # tokens of context per slot that stays
LAYERS = 4  # of pages in the attention benchmark: together several times the L2 cache
CODECS = ("bf16", "fp8", "int8", "int4", "int2")
WITHOUT = "compiled without attention"
CASES = (
    ("unequal", "native", ("eager", "captured", "compiled", WITHOUT)),
    ("equal", "native", ("compiled",)),
    ("unequal", "int4", ("captured", "compiled")),
)


def slot_bytes(sequences: list[SequenceCache]) -> float:
    """Bytes of stored slots with their metadata, without the padding of pages."""
    return sum(
        sum(part.lens) * part.page_class.bytes_per_slot
        for sequence in sequences
        for layer in range(sequence.spec.num_layers)
        for part in sequence.layer_parts(layer)
    )


def open_bytes(sequences: list[SequenceCache]) -> float:
    """Bytes of open slots a step reads, half full on average."""
    return sum(sequence.open.num_bytes / 2 for sequence in sequences)


# Attention alone


def attention_rows(context: int, batch: int, bandwidth: float) -> Iterator[Row]:
    model = llama(num_hidden_layers=LAYERS)
    with attach(model) as attached:
        spec = attached.spec
        lengths = [head_lengths(LAYERS, 8, context, 8 * context, seed=seed) for seed in range(batch)]
        print(f"head lengths, seed 0: {describe(lengths[0])}")
        dense_ms = sdpa_ms(context, batch)
        dense_floor_ms = floor_ms(2 * 2 * 128 * 8 * context * batch, bandwidth)
        yield {
            "question": "attention", "system": "SDPA", "context": context, "batch": batch, "codec": "bf16",
            "ms": dense_ms, "floor_ms": dense_floor_ms, "bandwidth_percent": 100 * dense_floor_ms / dense_ms,
        }  # fmt: skip
        for codec in CODECS:
            policy = Policy.parse(codec)
            arena = Arena(arena_bytes(spec, policy, context, sequences=batch), device="cuda")
            runner = Runner(model, spec, arena)
            sequences = [filled(runner, policy, item, context, seed) for seed, item in enumerate(lengths)]
            ms = attention_ms(sequences)
            floor = floor_ms(slot_bytes(sequences) / LAYERS, bandwidth)
            yield {
                "question": "attention", "system": "kvfold", "context": context, "batch": batch, "codec": codec,
                "ms": ms, "floor_ms": floor, "bandwidth_percent": 100 * floor / ms, "times_sdpa": dense_ms / ms,
            }  # fmt: skip
            del sequences, runner, arena
            clean()


def attention_ms(sequences: list[SequenceCache]) -> float:
    """Milliseconds of one layer's attention, the median over graph replays through all layers."""
    layout = layout_of(sequences[0])
    assert layout is not None
    lanes = Lanes(layout, sequences, len(sequences))
    lanes.place(sequences)
    spec = sequences[0].spec.layers[0]
    shape = (len(sequences), spec.head_dim)
    q, k, v = (torch.randn(heads, *shape, device="cuda", dtype=torch.bfloat16) for heads in (32, 8, 8))
    step = Step(lanes, torch.zeros(len(sequences), dtype=torch.int32, device="cuda"), 1)

    def run() -> None:
        for layer in range(LAYERS):
            step.attend(layer, q, k, v)

    return graph_ms(run, inner=4) / LAYERS


def sdpa_ms(context: int, batch: int) -> float:
    """The same for a dense cache; enough layers that none is read from the L2 cache."""
    layers = [torch.randn(2, batch, 8, context, 128, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for k, v in layers:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    found = graph_ms(run, inner=2) / LAYERS
    layers.clear()
    return found


# The whole step


def step_rows(model: Any, context: int, batch: int, bandwidth: float, steps: int) -> Iterator[Row]:
    mean = context // KEEP
    weights = weight_bytes(model)
    peer = dynamic_ms(model, context, batch)
    yield {
        "question": "step", "system": "DynamicCache", "context": context, "batch": batch, "kept": "all", "ms": peer,
        "tokens_per_s": None if peer is None else 1e3 * batch / peer,
        "floor_ms": floor_ms(weights + 131072 * context * batch, bandwidth),
    }  # fmt: skip
    with attach(model) as attached:
        graphs = graphs_of(model)
        for heads, codec, modes in CASES:
            policy = Policy.parse(codec)
            room = mean + mean // 4 + 1024  # heads that grow take an eighth more than they need
            arena = Arena(arena_bytes(attached.spec, policy, room, sequences=batch), device="cuda")
            runner = Runner(model, attached.spec, arena)
            sequences = [filled(runner, policy, lengths(heads, mean, seed), context, seed) for seed in range(batch)]
            stored = slot_bytes(sequences) + open_bytes(sequences)
            about = {"context": context, "batch": batch, "kept": f"1/{KEEP}", "codec": codec, "heads": heads}
            floor = floor_ms(weights + stored, bandwidth)
            for mode in modes:
                values = mode_ms(runner, graphs, sequences, mode, steps)
                mean_ms = sum(values) / len(values)
                yield {
                    "question": "step", "system": mode, **about, **spread(values, "ms"), "mean_ms": mean_ms,
                    "tokens_per_s": 1e3 * batch / mean_ms, "floor_ms": floor, "times_floor": mean_ms / floor,
                    "kv_floor_ms": floor_ms(stored, bandwidth), "setup_s": graphs.setup_s,
                }  # fmt: skip
            for sequence in sequences:
                sequence.release()
            graphs.forget()
            del sequences, runner, arena
            clean()


def lengths(heads: str, mean: int, seed: int) -> Lengths:
    if heads == "equal":
        return [[mean] * 8 for _ in range(32)]
    found = head_lengths(32, 8, mean, KEEP * mean, seed=seed)
    if seed == 0:
        print(f"head lengths, seed 0: {describe(found)}")
    return found


def mode_ms(runner: Runner, graphs: Any, sequences: list[SequenceCache], mode: str, steps: int) -> list[float]:
    """Milliseconds of each step, host work and seals included; the tokens are sampled greedily on the device."""
    graphs.compile = mode.startswith("compiled")
    graphs.enabled = mode != "eager"
    with no_attention() if mode == WITHOUT else nullcontext():
        if mode == WITHOUT:
            graphs.forget()
        tokens = [0] * len(sequences)
        found = []
        warm_up, count = (3, 5) if mode == "eager" else (36, steps)  # past a seal, whose kernel is built then
        for step in range(warm_up + count):
            torch.cuda.synchronize()
            began = time.perf_counter()
            tokens = runner.decode(sequences, tokens).argmax(-1).tolist()
            if step >= warm_up:
                found.append(1e3 * (time.perf_counter() - began))
    if mode == WITHOUT:
        graphs.forget()
    return found


@contextmanager
def no_attention() -> Iterator[None]:
    """Steps whose attention reads nothing: what is left is the model's own time."""
    before = Step.attend
    Step.attend = lambda self, layer, q_QND, k_HND, v_HND: q_QND.transpose(0, 1)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Step.attend = before  # type: ignore[method-assign]


def dynamic_ms(model: Any, context: int, batch: int) -> float | None:
    """Median milliseconds of transformers' own step over the whole context; None where memory does not suffice."""
    try:
        return _dynamic_ms(model, context, batch)
    except torch.OutOfMemoryError:
        return None
    finally:
        clean()


def _dynamic_ms(model: Any, context: int, batch: int) -> float:
    cache = DynamicCache(config=model.config)
    for layer in range(model.config.num_hidden_layers):
        k = torch.randn((batch, 8, context, 128), device="cuda", dtype=torch.bfloat16)
        cache.update(k, torch.randn_like(k), layer)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")

    def run() -> None:
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)

    return sorted(event_ms(run, repeats=5))[2]


def filled(runner: Runner, policy: Policy, lengths: Lengths, context: int, seed: int) -> SequenceCache:
    sequence = runner.new_sequence(policy)
    fill(sequence, lengths, context, seed)
    return sequence


def clean() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def measured(args: argparse.Namespace, shapes: list[tuple[int, ...]], bandwidth: float) -> Iterator[Row]:
    if "attention" in args.what:
        for context, batch in shapes:
            yield from attention_rows(context, batch, bandwidth)
    if "step" in args.what:
        model = llama()
        for context, batch in shapes:
            yield from step_rows(model, context, batch, bandwidth, args.steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["attention", "step"], help="attention, step (default: both)")
    parser.add_argument("--context", default="131072x1,32768x16", help="tokens x sequences, comma-separated")
    parser.add_argument("--steps", type=int, default=64, help="decode steps timed in each mode")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/gpu_decode.jsonl")
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    clean()
    shapes = [tuple(int(n) for n in shape.split("x")) for shape in args.context.split(",")]
    rows: list[Row] = []
    for row in measured(args, shapes, bandwidth):
        print(row, flush=True)
        rows.append(row)
    report("gpu_decode", rows, save=args.save, model="Llama-3.1-8B shape", copy_TB_s=bandwidth / 1e12)


if __name__ == "__main__":
    main()
