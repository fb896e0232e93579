"""How do bytes a second of attention and tokens a second of a step change with the length of the context?

    python -m benchmarks.gpu sweep [--contexts 4096,16384,65536,131072] [--batch 4] [--seconds 170] [--save]

A model of the Llama-3.1-8B shape with random weights, compiled, over caches of all slots and of an eighth of them, in
bf16, int8 and int4, heads of unequal length. No case is started after `--seconds`. gpu_table.py --docs draws the rows.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks.commands import argument_parser
from benchmarks.gpu.attention import attention_ms
from benchmarks.gpu.common import clean, copy_bandwidth, floor_ms, llama, weight_bytes
from benchmarks.gpu.decode import Case, batch_of, mode_ms, speeds
from benchmarks.gpu.fill import open_bytes, slot_bytes
from benchmarks.rows import Row, report
from kvfold.models.attach import attach

CODECS = ("bf16", "int8", "int4")
KEEPS = (1, 8)  # tokens of context per slot that stays


def sweep_rows(model: Any, args: argparse.Namespace, bandwidth: float, deadline: float) -> Iterator[Row]:
    contexts = [int(context) for context in args.contexts.split(",")]
    with attach(model) as attached:
        for context, keep, codec in product(contexts, KEEPS, CODECS):
            if time.monotonic() > deadline:
                print(f"out of time before {context} tokens, {codec}, 1/{keep}")
                return
            case = Case("unequal", codec, ("compiled",))
            with batch_of(model, attached.spec, case, context // keep, context, args.batch) as (runner, sequences):
                stored, opened = slot_bytes(sequences), open_bytes(sequences)
                rate = stored / attached.spec.num_layers / (1e-3 * attention_ms(sequences))
                values = mode_ms(runner, sequences, "compiled", args.steps)
            floors = (floor_ms(stored + opened + more, bandwidth) for more in (weight_bytes(model), 0))
            what = {"question": "sweep", "context": context, "batch": args.batch, "keep": keep, "codec": codec}
            yield {**what, "attention_GB_s": rate / 1e9, **speeds(values, args.batch, *floors)}


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("gpu sweep", __doc__)
    parser.add_argument("--contexts", default="4096,16384,65536,131072")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=32, help="decode steps timed in each case")
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/gpu_sweep.jsonl")
    args = parser.parse_args(arguments)
    deadline, bandwidth = time.monotonic() + args.seconds, copy_bandwidth()
    clean()
    rows = sweep_rows(llama(), args, bandwidth, deadline)
    report("gpu_sweep", rows, save=args.save, model="Llama-3.1-8B shape", copy_TB_s=bandwidth / 1e12)
