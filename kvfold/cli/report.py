"""`kvfold report`: an HTML report of benchmark runs, in one file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kvfold.cli.options import Subparsers, add_option, check_out
from kvfold.policy.size import bytes_text

_EPILOG = """examples:
  kvfold report runs/smollm2-135m-quick-1a2b3c4d
  kvfold report runs/first runs/second --out both.html
  kvfold report runs/mine --paired "kvzip + global + int4" "keydiff + int4"
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
    parser.add_argument(
        "--paired",
        nargs=2,
        metavar=("POLICY", "OTHER"),
        help="print what one policy loses against another on the same samples, and write no report",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the report and print its path, or compare two policies."""
    if args.paired is not None:
        return _compare(args.runs, *args.paired)
    from kvfold.bench.report import write_report  # here: help comes without it

    check_out(args.out, *(file for run in args.runs for file in run.glob("*.json*")))
    write_report(args.runs, args.out)
    print(f"{args.out}, {bytes_text(args.out.stat().st_size)}")
    return 0


def _compare(runs: Sequence[Path], policy: str, other: str) -> int:
    from kvfold.bench.paired import compare, line
    from kvfold.bench.record import read_run

    for run in runs:
        print("\n".join(line(found) for found in compare(read_run(run), policy, other)))
    return 0
