"""`kvfold calibrate`: low-rank bases of a model's keys and values, for the codec `palu`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvfold.cli import show
from kvfold.cli.options import Subparsers, add_option, positive
from kvfold.cli.training.calibration_data import add_reading_parser, reading
from kvfold.policy.size import bytes_text

if TYPE_CHECKING:
    from kvfold.codec.basis import Bases

_EPILOG = """examples:
  kvfold calibrate --model smollm2-135m --out bases.safetensors
  kvfold calibrate --model smollm2-135m --heads 1 --out single.safetensors
  kvfold run --context notes.txt --ask "Who wrote this?" --policy 'palu("bases.safetensors", int8, rank=0.8)'
  kvfold run --context notes.txt --ask "Who wrote this?" --policy 'keydiff + 2x + palu("single.safetensors")'
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_reading_parser(
        subparsers,
        "calibrate",
        run,
        writes="the bases are",
        texts=14,
        length=512,
        help="compute low-rank bases of keys and values for the codec palu",
        description="Run texts with gradients and compute, for each layer and group of heads, the principal directions "
        "of keys and values, weighted by the loss gradient; the codec palu(FILE) stores the top ones.",
        epilog=_EPILOG,
    )
    add_option(parser, "--heads", "N", "KV heads per group, at most; 1 for policies that evict", positive, 4)


def run(args: argparse.Namespace) -> int:
    """Measure, write, tell."""
    from kvfold.train.bases import measure_bases  # here and below: help comes without torch

    with reading(args) as (model, texts, report):
        bases = measure_bases(model, texts, args.heads, report)
        bases.write(args.out)
        _tell_bases(args, bases)
    return 0


def _tell_bases(args: argparse.Namespace, measured: Bases) -> None:
    from kvfold.codec.palu import Palu

    num_bytes, kept = args.out.stat().st_size, Palu(str(args.out))
    rows = [(layer, kept.widths[layer, "k"], kept.widths[layer, "v"]) for layer in measured.layers]
    if args.json:
        found = {"file": str(args.out), "bytes": num_bytes, "digest": measured.digest, "heads": measured.num_heads}
        layers = [{"layer": layer, "k": k, "v": v} for layer, k, v in rows]
        show.print_json(found | {"measured": measured.measured, "rank": kept.rank, "layers": layers})
        return
    table = show.Table(numbers=("layer", "keys", "values"))
    for row in rows:
        table.add(*map(str, row))
    table.print()
    print(
        f"\n{args.out}, {bytes_text(num_bytes)}: {measured.model}, heads stored by {measured.num_heads}; the "
        f"table shows how many channels of a head palu keeps at rank={kept.rank}"
    )
