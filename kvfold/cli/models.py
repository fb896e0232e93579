"""`kvfold models`: list the catalogue of models and embedders, pull one, verify or remove a pulled one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict

from kvfold.cli.options import Subparsers, add_json_option
from kvfold.cli.show import Table, print_json
from kvfold.models.pull.pull import CATALOGUE, HOME_HELP, ModelRow, home_folder, list_models, pull, remove, verify
from kvfold.policy.size import bytes_text

_EPILOG = f"""examples:
  kvfold models                       what can be pulled by name, and its size on disk
  kvfold models pull smollm2-135m
  kvfold models rm smollm2-135m
  kvfold models pull potion-base-8m   vectors with which shorten(…) compares sentences

Other models are given as --model FOLDER (a transformers checkpoint) or --model ORG/NAME (of the Hugging Face hub).

{HOME_HELP}
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `models` with its verbs `list` (the default), `pull`, `verify` and `rm`."""
    parser = subparsers.add_parser(
        "models",
        help="list, pull, verify and remove models and embedders",
        description="List, pull, verify and remove models and embedders.",
        epilog=_EPILOG,
    )
    add_json_option(parser)
    parser.set_defaults(run=run, verb="list")
    verbs = parser.add_subparsers(metavar="VERB")
    for verb, text in (
        ("list", "list models and embedders that can be pulled by name, and their size on disk; the default"),
        ("pull", "download a model once; an interrupted download is resumed"),
        ("verify", "hash every file of a pulled model"),
        ("rm", "delete a pulled model, and what an interrupted pull left of it"),
    ):
        sub = verbs.add_parser(verb, help=text, description=f"{text[0].upper()}{text[1:]}.")
        if verb != "list":
            sub.add_argument("name", choices=list(CATALOGUE), metavar="NAME", help=", ".join(CATALOGUE))
        add_json_option(sub, default=argparse.SUPPRESS)  # or it would overrule one before the verb
        sub.set_defaults(verb=verb)


def run(args: argparse.Namespace) -> int:
    """Carry out the chosen verb; errors are raised as ModelError."""
    content, show = {"list": _list, "pull": _pull, "verify": _verify, "rm": _remove}[args.verb](args)
    if args.json:
        print_json(content)
    else:
        show()
    return 0


Told = tuple[object, Callable[[], None]]  # for machines; prints it for people


def _list(args: argparse.Namespace) -> Told:
    rows = list_models()
    return [asdict(row) for row in rows], lambda: _print_table(rows)


def _pull(args: argparse.Namespace) -> Told:
    folder = str(pull(args.name))
    return {"name": args.name, "folder": folder}, lambda: print(folder)


def _verify(args: argparse.Namespace) -> Told:
    manifest = verify(args.name)
    text = f"{args.name}: all files as pulled from {manifest.source} ({manifest.weights})"
    return asdict(manifest), lambda: print(text)


def _remove(args: argparse.Namespace) -> Told:
    num_bytes = remove(args.name)
    return {"name": args.name, "freed_bytes": num_bytes}, lambda: print(f"{args.name}: {bytes_text(num_bytes)} freed")


def _print_table(rows: list[ModelRow]) -> None:
    table = Table("name", "kind", "description", "licence", numbers=("parameters", "context", "on disk"))
    for row in rows:
        size = "-" if row.disk_bytes is None else bytes_text(row.disk_bytes)
        if row.partial_bytes:
            size = f"{bytes_text(row.partial_bytes)} partial"
        context = "-" if row.context_len is None else f"{row.context_len:,}"
        table.add(row.name, row.kind, row.description, row.licence, _short(row.num_parameters), context, size)
    table.print()
    if sys.stdout.isatty():
        total = sum((row.disk_bytes or 0) + row.partial_bytes for row in rows)
        print(f"{bytes_text(total)} in {home_folder() / 'models'}")


def _short(number: float) -> str:
    """134515008 -> 135M; billions have one decimal."""
    for unit in ("", "k", "M"):
        if number < 999.5:
            return f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.1f}B"
