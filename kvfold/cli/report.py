"""`kvfold report`: an HTML report of benchmark runs, in one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.policy.size import bytes_text

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = subparsers.add_parser("report", help="write an HTML report of benchmark runs")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder that kvfold bench wrote")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path."""
    from kvfold.bench.report import write_report  # here: help comes without it

    write_report(args.runs, args.out)
    print(f"{args.out}, {bytes_text(args.out.stat().st_size)}")
    return 0
