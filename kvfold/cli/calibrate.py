"""`kvfold calibrate`: find what a model's keys and values keep to, for the codec `palu`, or follow from, for `aqua`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvfold.cli import show
from kvfold.cli.options import Subparsers
from kvfold.cli.texts import add_reading_parser, positive, reading
from kvfold.errors import InputError
from kvfold.policy.size import bytes_text

if TYPE_CHECKING:
    from kvfold.codec.bases import Bases
    from kvfold.train.lifts import Measured

_EPILOG = """examples:
  kvfold calibrate --model smollm2-135m --out bases.safetensors
  kvfold calibrate --model smollm2-135m --heads 1 --out single.safetensors
  kvfold run --context notes.txt --ask "Who wrote this?" --policy 'palu("bases.safetensors", int8, rank=0.8)'
  kvfold calibrate --model smollm2-135m --for aqua --out lifts.safetensors
  kvfold run --context notes.txt --ask "Who wrote this?" --policy 'aqua("lifts.safetensors", int2, roots=int4)'
  kvfold run --context notes.txt --ask "Who wrote this?" --policy 'keydiff + 2x + palu("single.safetensors")'
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = add_reading_parser(
        subparsers,
        "calibrate",
        run,
        writes="what was found is",
        texts=14,
        length=512,
        help="find the directions of keys and values that matter, or what follows from the layer below",
        description="Read texts with gradients and find, for each layer and group of heads, the directions that keys "
        "and values keep to and what each is worth; the codec palu(FILE) stores the best of them. Or, for the codec "
        "aqua(FILE), find for every second layer how its keys and values follow from those of the layer below.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--for", dest="codec", choices=("palu", "aqua"), default="palu", help="the codec (default: %(default)s)"
    )
    parser.add_argument(
        "--heads",
        type=positive,
        metavar="N",
        help="for palu: KV heads stored together, at most; 1 for policies that evict (default: 4)",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write, tell."""
    from kvfold.train.bases import measure_bases  # here and below: help comes without torch
    from kvfold.train.lifts import measure_lifts

    if args.codec == "aqua" and args.heads is not None:
        raise InputError("--heads is for palu; aqua takes all heads of a layer together")
    with reading(args) as (model, texts, report):
        if args.codec == "aqua":
            found = measure_lifts(model, texts, report)
            found.lifts.write(args.out)
            _tell_lifts(args, found)
        else:
            bases = measure_bases(model, texts, args.heads or 4, report)
            bases.write(args.out)
            _tell_bases(args, bases)
    return 0


def _tell_lifts(args: argparse.Namespace, measured: Measured) -> None:
    num_bytes, lifts = args.out.stat().st_size, measured.lifts
    rows = [(layer, *(round(sides[side], 3) for side in ("k", "v"))) for layer, sides in measured.told.items()]
    if args.json:
        found = {"file": str(args.out), "bytes": num_bytes, "digest": lifts.digest, "measured": lifts.measured}
        show.print_json(found | {"layers": [{"layer": layer, "k": k, "v": v} for layer, k, v in rows]})
        return
    table = show.new_table(numbers=("layer", "keys", "values"))
    for layer, k, v in rows:
        table.add_row(str(layer), f"{k:.0%}", f"{v:.0%}")
    show.console().print(table)
    print(
        f"\n{args.out}, {bytes_text(num_bytes)}: {lifts.model}; the table shows how much of the variance of these "
        "layers the layer below tells"
    )


def _tell_bases(args: argparse.Namespace, measured: Bases) -> None:
    from kvfold.codec.palu import Palu

    num_bytes, kept = args.out.stat().st_size, Palu(str(args.out))
    rows = [(layer, kept.widths[layer, "k"], kept.widths[layer, "v"]) for layer in measured.layers]
    if args.json:
        found = {"file": str(args.out), "bytes": num_bytes, "digest": measured.digest, "heads": measured.num_heads}
        layers = [{"layer": layer, "k": k, "v": v} for layer, k, v in rows]
        show.print_json(found | {"measured": measured.measured, "rank": kept.rank, "layers": layers})
        return
    table = show.new_table(numbers=("layer", "keys", "values"))
    for row in rows:
        table.add_row(*map(str, row))
    show.console().print(table)
    print(
        f"\n{args.out}, {bytes_text(num_bytes)}: {measured.model}, heads stored by {measured.num_heads}; the "
        f"table shows how many channels of a head palu keeps at rank={kept.rank}"
    )
