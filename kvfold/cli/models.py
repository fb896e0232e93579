"""`kvfold models`: list the catalogue, pull a model, verify a pulled one."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from kvfold.models.catalogue import CATALOGUE
from kvfold.models.download import ModelRow, list_models, pull, verify


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add `models` with its verbs `list` (the default), `pull` and `verify`."""
    parser = subparsers.add_parser("models", help="list, pull and verify models")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    parser.set_defaults(run=run, verb="list")
    verbs = parser.add_subparsers(metavar="VERB")
    for verb, help_text in (("pull", "fetch a model once"), ("verify", "hash every file of a pulled model")):
        sub = verbs.add_parser(verb, help=help_text)
        sub.add_argument("name", choices=list(CATALOGUE), metavar="NAME", help=", ".join(CATALOGUE))
        sub.set_defaults(verb=verb)


def run(args: argparse.Namespace) -> int:
    """Carry out the chosen verb; errors are raised as ModelError."""
    if args.verb == "pull":
        print(pull(args.name))
    elif args.verb == "verify":
        manifest = verify(args.name)
        print(f"{args.name}: all files as pulled from {manifest.source} ({manifest.weights})")
    else:
        _print_list(list_models(), as_json=args.json)
    return 0


def _print_list(rows: list[ModelRow], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        Console(file=sys.stdout).print(_table(rows))


def _table(rows: list[ModelRow]) -> Table:
    table = Table("name", "description", "licence", box=None, pad_edge=False)
    for heading in ("parameters", "context", "on disk"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        size = "-" if row.disk_bytes is None else _short(row.disk_bytes) + "B"
        parameters, context = _short(row.num_parameters), f"{row.context_len:,}"
        table.add_row(row.name, row.description, row.licence, parameters, context, size)
    return table


def _short(number: float) -> str:
    """134515008 -> 135M."""
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.1f}G"
