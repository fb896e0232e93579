"""`kvfold policies`: every term of the policy language; with an expression or a term, what that one does."""

from __future__ import annotations

import argparse
import sys
from itertools import groupby

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from kvfold.cli.options import Subparsers, add_json_option
from kvfold.cli.show import Table, print_json
from kvfold.errors import PolicyError
from kvfold.policy import Policy
from kvfold.policy.describe import Row, about, explain, rows
from kvfold.policy.registry import find
from kvfold.policy.size import EXAMPLES

_SHOWN_DIGITS = 16
_EPILOG = """examples:
  kvfold policies                                  every term, by axis
  kvfold policies | grep -i question               in a pipe: one term per line, a tab between columns
  kvfold policies snapkv                           one term, with all its arguments
  kvfold policies "snapkv + ada + 8x + int4"       what a policy does

A policy is terms of different axes joined by " + ": a score and a size evict (keydiff + 4x), a codec quantises (int4).
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "policies",
        help="list the terms of the policy language, or explain a policy",
        description="List the terms of the policy language, or explain a policy or a term.",
        epilog=_EPILOG,
    )
    explained = 'explain this policy, e.g. "snapkv + ada + 8x + int4", or this term, e.g. h2o'
    parser.add_argument("expression", nargs="?", metavar="POLICY", help=explained)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """List or explain; a bad expression raises PolicyError. A term that is no policy by itself is explained alone."""
    if args.expression is None:
        _show_all(rows(), args.json)
        return 0
    try:
        policy = Policy.parse(args.expression)
    except PolicyError:
        term = find(args.expression.strip())
        if term is None:
            raise
        _show_facts(about(term), args.json)
        return 0
    facts = {"policy": policy.short, "canonical": str(policy), "fingerprint": policy.fingerprint, **explain(policy)}
    if not args.json:
        facts["fingerprint"] = policy.fingerprint[:_SHOWN_DIGITS]
    _show_facts(facts, args.json)
    return 0


def _show_facts(facts: dict[str, str], as_json: bool) -> None:
    if as_json:
        print_json(facts)
    elif sys.stdout.isatty():
        table = RichTable(box=None, show_header=False, pad_edge=False)
        for name, text in facts.items():
            table.add_row(Text(name, "bold"), Text(text))
        Console().print(table)
    else:
        for name, text in facts.items():
            print(name, " ".join(text.split()), sep="\t")


def _show_all(listed: tuple[Row, ...], as_json: bool) -> None:
    if as_json:
        print_json([row._asdict() for row in listed])
        return
    columns = ("term", "arguments", "cost", "paper", "what it does")
    if not sys.stdout.isatty():
        table = Table("axis", *columns)
        for row in listed:
            table.add(row.axis, *_cells(row))
        table.add("size", EXAMPLES, "", "", "", "how much is kept")
        table.print()
        return
    for axis, group in groupby(listed, key=lambda row: row.axis):
        print(f"\n{axis}")
        table = Table(*columns)
        for row in group:
            table.add(*_cells(row))
        table.print()
    print(f"\nsize  {EXAMPLES}")
    print("A phase has its own terms in prefill(...) or decode(...); * marks the default of an axis.")


def _cells(row: Row) -> tuple[str, ...]:
    return f"{row.name}{'*' if row.is_default else ''}", row.arguments, row.cost, row.paper, row.summary
