"""`kvfold memory`: what users said, kept over conversations; written and recalled without a model."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli.options import (
    Parser,
    Subparsers,
    add_json_option,
    add_option,
    checked,
    nonempty,
    positive,
    read_document,
)
from kvfold.cli.show import Table, print_json
from kvfold.memory.dates import day_text, parse_date

if TYPE_CHECKING:
    from kvfold.memory.fact import Fact
    from kvfold.memory.memory import Memory

_EPILOG = """examples:
  kvfold memory add --user anna "I live in Berlin. My dog is called Rex."
  kvfold memory ask --user anna "Where do I live?"
  kvfold memory ls --user anna

Facts are the sentences of what was added, word for word. They are kept in memory/memory.db under KVFOLD_HOME, or in
--file FILE.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `memory` and its verbs."""
    parser = subparsers.add_parser(
        "memory",
        help="keep what users said, and recall it",
        description="Keep what users said, and recall it: facts with dates in an SQLite file.",
        epilog=_EPILOG,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    add = _add_verb(verbs, "add", "write the facts of a text", _add)
    add.add_argument("text", metavar="TEXT", type=nonempty, help="what the user said; - is stdin")
    add_option(add, "--at", "DATE", "when it was said, e.g. 2026-03-01 (default: now)", checked(parse_date))
    add_option(add, "--source", "NAME", "what it comes from, e.g. chat-12", default="")
    ask = _add_verb(verbs, "ask", "recall the facts nearest to a question", _ask)
    ask.add_argument("question", metavar="QUESTION", type=nonempty, help="what to look for")
    _add_at(ask)
    add_option(ask, "--top", "N", "at most N facts", positive, 12)
    listed = _add_verb(verbs, "ls", "list facts by id, with their dates", _list)
    _add_at(listed)


def _add_verb(verbs: Subparsers, name: str, text: str, run: Any) -> Parser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    add_option(parser, "--user", "NAME", "whose facts", nonempty, required=True)
    add_option(parser, "--tenant", "NAME", "the user's tenant: the name of an API key of kvfold serve", default="")
    add_option(parser, "--file", "FILE", "the SQLite file (default: memory/memory.db under KVFOLD_HOME)", Path)
    text = "vectors that compare facts: auto, potion, minilm, hashed, a folder"
    add_option(parser, "--embedder", "NAME", text, nonempty, "auto")
    add_json_option(parser)
    parser.set_defaults(run=run)
    return parser


def _add_at(parser: argparse.ArgumentParser) -> None:
    text = "as it was on that day, e.g. 2026-03-01"
    add_option(parser, "--at", "DATE", text, checked(lambda text: parse_date(text, is_end=True)))


def _open(args: argparse.Namespace) -> Memory:
    from kvfold.memory.memory import Memory  # here: help comes without numpy

    return Memory(args.file, args.user, tenant=args.tenant, embedder=args.embedder)


def _add(args: argparse.Namespace) -> int:
    text = read_document("-") if args.text == "-" else args.text
    with _open(args) as memory:
        written = memory.add(text, source=args.source, at=args.at)
    if args.json:
        print_json([fact.to_json() for fact in written])
    else:
        _print_facts(written)
        print(f"{len(written)} facts written")
    return 0


def _ask(args: argparse.Namespace) -> int:
    with _open(args) as memory:
        found = memory.recall(args.question, at=args.at, top=args.top)
    if args.json:
        print_json([{**one.fact.to_json(), "score": round(one.score, 6)} for one in found])
    elif found:
        _print_facts([one.fact for one in found])
    else:
        print(f"nothing near this question is known of {args.user}", file=sys.stderr)
    return 0


def _list(args: argparse.Namespace) -> int:
    with _open(args) as memory:
        facts = memory.facts(at=args.at)
    if args.json:
        print_json([fact.to_json() for fact in facts])
    else:
        _print_facts(facts)
    return 0


def _print_facts(facts: Any) -> None:
    table = Table("from", "to", "fact", numbers=("id",))
    for fact in facts:
        table.add(*_row(fact))
    table.print()


def _row(fact: Fact) -> tuple[str, ...]:
    end = "" if fact.valid_to is None else day_text(fact.valid_to)
    return day_text(fact.valid_from), end, fact.text, str(fact.id)
