"""How much of the copy bandwidth does attention over pages reach?

    python -m benchmarks.gpu attention [--context 131072x1,32768x16] [--codecs bf16,int4] [--save]

Both decode kernels alone, over pages of unequal heads that hold as many slots as a dense cache would, against SDPA over
such a cache. Four layers of the Llama-3.1-8B shape are read in turn, several times what the L2 cache holds, inside a
captured graph. A floor is the bytes of the slots with their scales over the copy bandwidth measured in the same run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.commands import argument_parser
from benchmarks.gpu.common import clean, copy_bandwidth, floor_ms, graph_ms, llama, parse_shapes
from benchmarks.gpu.fill import arena_bytes, describe, filled, head_lengths, slot_bytes
from benchmarks.rows import Row, report
from kvfold.core import ModelSpec
from kvfold.engine.runner import Runner
from kvfold.models.attach import attach
from kvfold.pages.arena import Arena
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.captured.batch_slots import BatchSlots
from kvfold.passes.captured.step import Step, layout_of
from kvfold.policy.policy import Policy

LAYERS = 4
CODECS = ("bf16", "fp8", "int8", "int4", "int2")


def attention_rows(context: int, batch: int, codecs: Sequence[str], bandwidth: float) -> Iterator[Row]:
    model = llama(num_hidden_layers=LAYERS)
    with attach(model) as attached:
        dense_ms = sdpa_ms(context, batch)
        about: Row = {"question": "attention", "context": context, "batch": batch}
        floor = floor_ms(2 * 2 * 128 * 8 * context * batch, bandwidth)
        yield {**about, "system": "SDPA", "codec": "bf16", **against(dense_ms, floor)}
        for codec in codecs:
            ms, num_bytes = pages_ms(model, attached.spec, codec, context, batch)
            row = against(ms, floor_ms(num_bytes, bandwidth))
            yield {**about, "system": "kvfold", "codec": codec, **row, "times_sdpa": dense_ms / ms}
            clean()


def against(ms: float, floor: float) -> Row:
    return {"ms": ms, "floor_ms": floor, "bandwidth_percent": 100 * floor / ms}


def pages_ms(model: object, spec: ModelSpec, codec: str, context: int, batch: int) -> tuple[float, float]:
    """Milliseconds of one layer's attention, and the bytes of its slots."""
    policy = Policy.parse(codec)
    runner = Runner(model, spec, Arena(arena_bytes(spec, policy, context, sequences=batch), device="cuda"))
    lengths = [head_lengths(LAYERS, 8, context, 8 * context, seed=seed) for seed in range(batch)]
    print(f"head lengths, seed 0: {describe(lengths[0])}")
    sequences = [filled(runner, policy, item, context, seed) for seed, item in enumerate(lengths)]
    return attention_ms(sequences), slot_bytes(sequences) / LAYERS


def attention_ms(sequences: Sequence[SequenceCache]) -> float:
    """Milliseconds of one layer's attention, the median over graph replays through all layers."""
    layout, spec = layout_of(sequences[0]), sequences[0].spec
    assert layout is not None
    lanes = BatchSlots(layout, sequences, len(sequences))
    lanes.place(sequences)
    shape = (len(sequences), spec.layers[0].head_dim)
    heads = (spec.layers[0].num_query_heads, spec.layers[0].num_kv_heads, spec.layers[0].num_kv_heads)
    q, k, v = (torch.randn(count, *shape, device="cuda", dtype=spec.dtype) for count in heads)
    step = Step(lanes, torch.zeros(len(sequences), dtype=torch.int32, device="cuda"), 1)

    def run() -> None:
        for layer in range(spec.num_layers):
            step.attend(layer, q, k, v)

    return graph_ms(run, inner=4) / spec.num_layers


def sdpa_ms(context: int, batch: int) -> float:
    """The same for a dense cache."""
    layers = [torch.randn(2, batch, 8, context, 128, device="cuda", dtype=torch.bfloat16) for _ in range(LAYERS)]
    q = torch.randn(batch, 32, 1, 128, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for k, v in layers:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    found = graph_ms(run, inner=2) / LAYERS
    layers.clear()
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("gpu attention", __doc__)
    parser.add_argument("--context", default="131072x1,32768x16", help="tokens x sequences, comma-separated")
    parser.add_argument("--codecs", default=",".join(CODECS))
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/gpu_attention.jsonl")
    args = parser.parse_args(arguments)
    bandwidth = copy_bandwidth()
    clean()
    shapes = parse_shapes(args.context)
    rows = (row for shape in shapes for row in attention_rows(*shape, args.codecs.split(","), bandwidth))
    report("gpu_attention", rows, save=args.save, model="Llama-3.1-8B shape", copy_TB_s=bandwidth / 1e12)
