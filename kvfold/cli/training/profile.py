"""`kvfold profile`: per-head KV budgets of a model, measured offline, for the budget `profile`."""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING

from kvfold.cli import show
from kvfold.cli.options import Subparsers
from kvfold.cli.training.calibration_data import add_reading_parser, reading
from kvfold.errors import InputError

if TYPE_CHECKING:
    from kvfold.budget.profile import HeadProfile

LOSS = 0.05
_EPILOG = """examples:
  kvfold profile --model smollm2-135m --out heads.json
  kvfold profile --model smollm2-135m --text notes.txt --length 2048 --out heads.json
  kvfold profile --model smollm2-135m --by keys --out layers.json
  kvfold run --context notes.txt --ask "Who wrote this?" --policy 'keydiff + profile(file="heads.json") + 4x'
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = add_reading_parser(
        subparsers,
        "profile",
        run,
        writes="the profile is",
        texts=14,
        length=1024,
        help="measure per-head KV budgets of a model",
        description="Run texts and measure, for each KV head, the share of slots that hold all but --loss of its "
        "attention, or for each layer how much its keys change when the past is cut; the budget profile(file=...) "
        "allocates slots by it.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--by",
        choices=("attention", "keys"),
        default="attention",
        help="attention mass of heads (default), or how much a layer's keys change when the past is cut (EpiCache)",
    )
    parser.add_argument(
        "--loss",
        type=float,
        help=f"with --by attention: share of a head's attention that may be lost (default: {LOSS})",
    )


def run(args: argparse.Namespace) -> int:
    """Measure, write, tell."""
    from kvfold.train.profile import measure_heads, measure_layers  # here and below: help comes without torch

    if args.by == "keys" and args.loss is not None:
        raise InputError("--loss is a share of attention; leave it out with --by keys")
    if args.loss is not None and not 0 <= args.loss < 1:
        raise InputError(f"--loss is {args.loss:g}; the loss is a share of a head's attention, from 0 to below 1")
    with reading(args) as (model, texts, report):
        if args.by == "keys":
            measured = measure_layers(model, texts, report)
        else:
            measured = measure_heads(model, texts, LOSS if args.loss is None else args.loss, report)
    measured.write(args.out)
    _tell(args, measured)
    return 0


def _tell(args: argparse.Namespace, measured: HeadProfile) -> None:
    if args.json:
        show.print_json({"file": str(args.out), "digest": measured.digest, **vars(measured)})
        return
    table = show.Table(numbers=("layer", "least", "mean", "most"))
    for place, layer in enumerate(measured.needs):
        table.add(str(place), *(f"{100 * need:.1f} %" for need in (min(layer), statistics.mean(layer), max(layer))))
    table.print()
    print(f"\n{args.out}: shares of slots that heads of {measured.model} need, on {measured.measured}")
