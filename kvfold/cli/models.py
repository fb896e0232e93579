"""`kvfold models`: list the catalogue, pull a model, verify or remove a pulled one."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from kvfold.models.pull.catalogue import CATALOGUE
from kvfold.models.pull.pull import ModelRow, list_models, pull, remove, verify

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_PIPED_WIDTH = 140  # without a terminal there is no width to fit


def add_parser(subparsers: Subparsers) -> None:
    """Add `models` with its verbs `list` (the default), `pull`, `verify` and `rm`."""
    parser = subparsers.add_parser("models", help="list, pull, verify and remove models")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, verb="list")
    verbs = parser.add_subparsers(metavar="VERB")
    for verb, help_text in (
        ("pull", "download a model once"),
        ("verify", "hash every file of a pulled model"),
        ("rm", "delete a pulled model, and what an interrupted pull left of it"),
    ):
        sub = verbs.add_parser(verb, help=help_text)
        sub.add_argument("name", choices=list(CATALOGUE), metavar="NAME", help=", ".join(CATALOGUE))
        sub.set_defaults(verb=verb)


def run(args: argparse.Namespace) -> int:
    """Carry out the chosen verb; errors are raised as ModelError."""
    show = {"list": _list, "pull": _pull, "verify": _verify, "rm": _remove}[args.verb]
    show(args)
    return 0


def _list(args: argparse.Namespace) -> None:
    rows = list_models()
    if args.json:
        _print_json([asdict(row) for row in rows])
    else:
        Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH).print(_table(rows))


def _pull(args: argparse.Namespace) -> None:
    folder = str(pull(args.name))
    if args.json:
        _print_json({"name": args.name, "folder": folder})
    else:
        print(folder)


def _verify(args: argparse.Namespace) -> None:
    manifest = verify(args.name)
    if args.json:
        _print_json(asdict(manifest))
    else:
        print(f"{args.name}: all files as pulled from {manifest.source} ({manifest.weights})")


def _remove(args: argparse.Namespace) -> None:
    num_bytes = remove(args.name)
    if args.json:
        _print_json({"name": args.name, "freed_bytes": num_bytes})
    else:
        print(f"{args.name}: {_short(num_bytes, ('B', 'kB', 'MB', 'GB'))} freed")


def _print_json(content: object) -> None:
    print(json.dumps(content, indent=2))


def _table(rows: list[ModelRow]) -> Table:
    table = Table("name", "description", "licence", box=None, pad_edge=False)
    for heading in ("parameters", "context", "on disk"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        size = "-" if row.disk_bytes is None else _short(row.disk_bytes, ("B", "kB", "MB", "GB"))
        parameters, context = _short(row.num_parameters, ("", "k", "M", "B")), f"{row.context_len:,}"
        table.add_row(row.name, row.description, row.licence, parameters, context, size)
    return table


def _short(number: float, units: tuple[str, ...]) -> str:
    """134515008 -> 135M; the last unit has one decimal."""
    for unit in units[:-1]:
        if number < 999.5:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.1f}{units[-1]}"
