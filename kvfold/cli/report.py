"""`kvfold report`: an HTML report of benchmark runs, in one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvfold.cli.options import Subparsers, add_option, check_out
from kvfold.policy.size import bytes_text

_EPILOG = """examples:
  kvfold report runs/smollm2-135m-quick-1a2b3c4d
  kvfold report runs/first runs/second --out both.html
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "report",
        help="write an HTML report of benchmark runs",
        description="Write one HTML file with tables and charts of one or more runs of kvfold bench.",
        epilog=_EPILOG,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="DIR", help="folder that kvfold bench wrote")
    add_option(parser, "--out", "FILE", "HTML file to write", Path, Path("report.html"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path."""
    from kvfold.bench.report import write_report  # here: help comes without it

    check_out(args.out)
    write_report(args.runs, args.out)
    print(f"{args.out}, {bytes_text(args.out.stat().st_size)}")
    return 0
