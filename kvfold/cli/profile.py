"""`kvfold profile`: measure what each head of a model needs, for the budget `profile`."""

from __future__ import annotations

import argparse
import statistics
from typing import TYPE_CHECKING

from kvfold.cli import show
from kvfold.cli.options import Subparsers
from kvfold.cli.texts import add_reading_parser, reading

if TYPE_CHECKING:
    from kvfold.budget.heads import HeadProfile

_EPILOG = """examples:
  kvfold profile --model smollm2-135m --out heads.json
  kvfold profile --model smollm2-135m --text notes.txt --length 2048 --out heads.json
  kvfold run --context notes.txt --ask "Who wrote this?" --policy 'keydiff + profile(file="heads.json") + 4x'
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = add_reading_parser(
        subparsers,
        "profile",
        run,
        writes="the profile is",
        texts=14,
        length=1024,
        help="measure what each head of a model needs",
        description="Read texts and measure, for each KV head, the share of slots that hold nearly all of its "
        "attention; the budget profile(file=...) shares slots by it.",
        epilog=_EPILOG,
    )
    parser.add_argument("--loss", type=float, default=0.05, help="of a head's attention (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure, write, tell."""
    from kvfold.train.profile import measure_heads  # here: help comes without torch

    with reading(args) as (model, texts, report):
        measured = measure_heads(model, texts, args.loss, report)
    measured.write(args.out)
    _tell(args, measured)
    return 0


def _tell(args: argparse.Namespace, measured: HeadProfile) -> None:
    if args.json:
        show.print_json({"file": str(args.out), "digest": measured.digest, **vars(measured)})
        return
    table = show.new_table(numbers=("layer", "least", "mean", "most"))
    for place, layer in enumerate(measured.needs):
        table.add_row(str(place), *(f"{100 * need:.1f} %" for need in (min(layer), statistics.mean(layer), max(layer))))
    show.console().print(table)
    print(f"\n{args.out}: what heads of {measured.model} need of {measured.measured}")
