"""How near does a decode step come to the time its bytes need?

    python -m benchmarks.gpu decode [--context 131072x1,32768x16] [--steps 64] [--save]

A model of the Llama-3.1-8B shape with random weights over a cache of an eighth of the context, under heads of unequal
and of equal lengths: called operation by operation, captured, compiled, and with attention left out, against kvfold's
own full cache (all slots; captured and compiled too, so that the difference is the compression's) and transformers with
DynamicCache (all slots, sdpa, eager: bound by the host).

Floors are bytes a step touches (weights without the input embedding, stored slots with their metadata, the open block)
over the copy bandwidth measured in the same run. Random weights attend evenly, so head lengths are imposed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache

from benchmarks.commands import argument_parser
from benchmarks.gpu.common import (
    clean,
    copy_bandwidth,
    event_ms,
    floor_ms,
    kv_bytes,
    llama,
    parse_shapes,
    spread,
    weight_bytes,
)
from benchmarks.gpu.fill import Lengths, arena_bytes, describe, filled, head_lengths, open_bytes, slot_bytes
from benchmarks.rows import Row, report
from kvfold.core import ModelSpec
from kvfold.engine.cuda_graphs import CudaGraphs, cuda_graphs_of
from kvfold.engine.generate import AsyncTokens, launch_next
from kvfold.engine.runner import Runner
from kvfold.models.attach import attach
from kvfold.pages.arena import Arena
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.step import Step
from kvfold.policy.policy import Policy

KEEP = 8  # tokens of context per slot that stays
FULL = "full"  # heads that hold every slot
WITHOUT = "compiled without attention"
WARM_UP = 36  # steps: past a seal, whose kernel is built then


class Case(NamedTuple):
    heads: str  # unequal or equal lengths, or FULL
    codec: str
    modes: tuple[str, ...]

    @property
    def keep(self) -> int:
        """Tokens of context per slot that stays."""
        return 1 if self.heads == FULL else KEEP


CASES = (
    Case("unequal", "native", ("eager", "captured", "compiled", WITHOUT)),
    Case("equal", "native", ("compiled",)),
    Case("unequal", "int4", ("captured", "compiled")),
    Case(FULL, "native", ("captured", "compiled")),
)


def step_rows(model: Any, context: int, batch: int, bandwidth: float, steps: int) -> Iterator[Row]:
    about: Row = {"question": "step", "context": context, "batch": batch}
    peer = dynamic_ms(model, context, batch)
    floor = floor_ms(weight_bytes(model) + kv_bytes(context, model.config) * batch, bandwidth)
    speed = {} if peer is None else {"tokens_per_s": 1e3 * batch / peer, "times_floor": peer / floor}
    yield {**about, "system": "DynamicCache", "kept": "all", "ms": peer, "floor_ms": floor, **speed}
    with attach(model) as attached:
        for case in CASES:
            with batch_of(model, attached.spec, case, context // case.keep, context, batch) as (runner, sequences):
                stored = slot_bytes(sequences) + open_bytes(sequences)
                floors = [floor_ms(stored + more, bandwidth) for more in (weight_bytes(model), 0)]
                for mode in case.modes:
                    values = mode_ms(runner, sequences, mode, steps)
                    kept = "all" if case.heads == FULL else f"1/{KEEP}"
                    what = {"system": mode, "kept": kept, "codec": case.codec, "heads": case.heads}
                    yield {**about, **what, **speeds(values, batch, *floors), "setup_s": runner.setup_s}


def speeds(values: list[float], batch: int, floor: float, kv_floor: float) -> Row:
    """Means, so that seals count; the median is that of a step without one."""
    mean = sum(values) / len(values)
    return {
        **spread(values, "ms"), "mean_ms": mean, "tokens_per_s": 1e3 * batch / mean, "floor_ms": floor,
        "times_floor": mean / floor, "kv_floor_ms": kv_floor,
    }  # fmt: skip


@contextmanager
def batch_of(
    model: Any, spec: ModelSpec, case: Case, mean: int, context: int, batch: int
) -> Iterator[tuple[Runner, list[SequenceCache]]]:
    """Sequences with `mean` slots a head on average, in an arena of their own whose memory is free afterwards, whoever
    still holds the runner: a loop does so until the next case has its own."""
    policy = Policy.parse(case.codec)
    room = mean + mean // 4 + 1024  # heads that grow take an eighth more than they need
    arena = Arena(arena_bytes(spec, policy, room, sequences=batch), device=model.device)
    runner = Runner(model, spec, arena)
    drawn = (lengths(spec, case.heads, mean, context, seed) for seed in range(batch))
    sequences = [filled(runner, policy, found, context, seed) for seed, found in enumerate(drawn)]
    try:
        yield runner, sequences
    finally:
        for sequence in sequences:
            sequence.release()
        sequences.clear()
        forget(cuda_graphs_of(model))
        storage = arena.memory.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:  # a CPU's, which is a mapping
            arena.memory = arena.memory.new_empty(0)
        clean()


def lengths(spec: ModelSpec, heads: str, mean: int, longest: int, seed: int) -> Lengths:
    num_heads = spec.layers[0].num_kv_heads
    if heads != "unequal":
        return [[mean] * num_heads for _ in spec.layers]
    found = head_lengths(spec.num_layers, num_heads, mean, max(longest, 8 * mean), seed=seed)
    if seed == 0:
        print(f"head lengths, seed 0: {describe(found)}")
    return found


def mode_ms(runner: Runner, sequences: Sequence[SequenceCache], mode: str, steps: int) -> list[float]:
    """Milliseconds of each step, seals and all that the host does included; tokens are sampled greedily."""
    graphs = runner.graphs
    assert graphs is not None
    graphs.compile, graphs.enabled = mode.startswith("compiled"), mode != "eager"
    if mode == "eager":
        return _eager_ms(runner, sequences, warm_up=3, steps=5)
    if mode != WITHOUT:
        return _queued_ms(runner, sequences, steps)
    forget(graphs)
    with no_attention():
        found = _queued_ms(runner, sequences, steps)
    forget(graphs)
    return found


def _eager_ms(runner: Runner, sequences: Sequence[SequenceCache], warm_up: int, steps: int) -> list[float]:
    tokens, times = [0] * len(sequences), [time.perf_counter()]
    for _ in range(warm_up + steps):
        tokens = runner.decode(sequences, tokens).argmax(-1).tolist()
        times.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in pairwise(times[warm_up:])]


def _queued_ms(runner: Runner, sequences: Sequence[SequenceCache], steps: int) -> list[float]:
    """As a reply is written: a step is launched before the host has the tokens of the last one."""
    tokens = AsyncTokens(sequences, runner.decode(sequences, [0] * len(sequences)))
    times = [time.perf_counter()]
    for _ in range(WARM_UP + steps):
        in_flight = launch_next(runner, sequences, tokens.on_device(sequences))
        if in_flight is None:
            raise SystemExit("error: the arena is full; give it more room")
        tokens.wait(sequences)
        in_flight.keep(sequences)
        tokens = in_flight.tokens
        times.append(time.perf_counter())
    return [1e3 * (end - begin) for begin, end in pairwise(times[WARM_UP:])]


def forget(graphs: CudaGraphs) -> None:
    """Graphs and what was compiled for them: after eight shapes of one function torch.compile would give up."""
    graphs.forget()
    torch.compiler.reset()


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
        return sorted(event_ms(dynamic_step(model, context, batch), repeats=5))[2]
    except torch.OutOfMemoryError:
        return None
    finally:
        clean()


def dynamic_step(model: Any, context: int, batch: int) -> Any:
    """One step of the unmodified model over an ordinary cache of random keys and values."""
    cache, config = DynamicCache(config=model.config), model.config
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        k = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        cache.update(k, torch.randn_like(k), layer)
    ids = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")

    def step() -> None:
        with torch.inference_mode():
            model(input_ids=ids, past_key_values=cache, use_cache=True)

    return step


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("gpu decode", __doc__)
    parser.add_argument("--context", default="131072x1,32768x16", help="tokens x sequences, comma-separated")
    parser.add_argument("--steps", type=int, default=64, help="decode steps timed in each mode")
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/gpu_decode.jsonl")
    args = parser.parse_args(arguments)
    bandwidth = copy_bandwidth()
    clean()
    model = llama()
    rows = (row for shape in parse_shapes(args.context) for row in step_rows(model, *shape, bandwidth, args.steps))
    report("gpu_decode", rows, save=args.save, model="Llama-3.1-8B shape", copy_TB_s=bandwidth / 1e12)
