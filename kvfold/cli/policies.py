"""`kvfold policies`: every term of the policy language; with an expression or a term, what that one does."""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvfold.errors import PolicyError
from kvfold.policy import Policy
from kvfold.policy.describe import Row, about, explain, rows
from kvfold.policy.registry import find
from kvfold.policy.size import EXAMPLES

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_SHOWN_DIGITS = 16
_PIPED_WIDTH = 160  # without a terminal there is no width to fit


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = subparsers.add_parser("policies", help="list the terms of the policy language, or explain a policy")
    explained = 'explain this policy, e.g. "snapkv + ada + 8x + int4", or this term, e.g. h2o'
    parser.add_argument("expression", nargs="?", help=explained)
    parser.add_argument("--json", action="store_true", help="print JSON for machines")
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
    _show_one(policy, args.json)
    return 0


def _show_one(policy: Policy, as_json: bool) -> None:
    facts = {"policy": policy.short, "canonical": str(policy), "fingerprint": policy.fingerprint, **explain(policy)}
    if not as_json:
        facts["fingerprint"] = policy.fingerprint[:_SHOWN_DIGITS]
    _show_facts(facts, as_json)


def _show_facts(facts: dict[str, str], as_json: bool) -> None:
    if as_json:
        _print_json(facts)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in facts.items():
        table.add_row(f"[bold]{name}[/bold]", escape(text))
    _console().print(table)


def _show_all(listed: tuple[Row, ...], as_json: bool) -> None:
    if as_json:
        _print_json([row._asdict() for row in listed])
        return
    console = _console()
    for axis, group in groupby(listed, key=lambda row: row.axis):
        console.print(_axis_table(axis, tuple(group)))
    console.print(f"[bold]size[/bold]  {escape(EXAMPLES)}")
    console.print("A phase has its own terms in prefill(...) or decode(...); * marks the default of an axis.")


def _axis_table(axis: str, group: tuple[Row, ...]) -> Table:
    table = Table(title=axis, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("term", "arguments", "cost", "paper", "what it does"):
        table.add_column(heading, no_wrap=heading == "term")
    for row in group:
        name = f"{row.name}{'*' if row.is_default else ''}"
        table.add_row(name, *map(escape, (row.arguments, row.cost, row.paper, row.summary)))
    return table


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))
