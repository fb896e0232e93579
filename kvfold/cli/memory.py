"""`kvfold memory`: what users said, kept over conversations; written and recalled without a model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.atomic_io import write_whole
from kvfold.cli import memory_eval, show
from kvfold.cli.options import (
    Parser,
    Subparsers,
    add_json_option,
    add_model_options,
    add_option,
    check_out,
    checked,
    load_model,
    nonempty,
    parse_policy,
    positive,
    read_document,
)
from kvfold.cli.show import Table, print_json
from kvfold.errors import FileError, InputError
from kvfold.memory.dates import day_text, parse_date
from kvfold.plurals import counted
from kvfold.policy import Policy

if TYPE_CHECKING:
    from kvfold.memory.fact import Fact
    from kvfold.memory.memory import Memory
    from kvfold.memory.recall import Recalled

_EPILOG = """examples:
  kvfold memory add --user anna "I live in Berlin. My dog is called Rex."
  kvfold memory ask --user anna "Where do I live?"
  kvfold memory ask --user anna "Where did I live?" --at 2026-03-01
  kvfold memory ask --user anna "Where do I live?" --model smollm2-135m
  kvfold memory ls --user anna
  kvfold memory export --user anna > anna.jsonl
  kvfold memory forget --user anna
  kvfold memory eval

Facts are the sentences of what was added, word for word. A later one with another value ends an older one, which stays
for questions about its time. They are kept in memory/memory.db under KVFOLD_HOME, or in --file FILE.
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
    ask.add_argument("--closest", action="store_true", help="show the closest facts even where none is near")
    add_option(ask, "--policy", "POLICY", "of the model's KV cache", str, "full")
    text = "keep the user's facts as a stored KV prefix, which the model need not read again"
    ask.add_argument("--kv-prefix", action="store_true", help=text)
    add_option(ask, "--max-new-tokens", "N", "maximum tokens of the answer", positive, 64)
    add_model_options(ask, needed=False, does="answers from the recalled facts")
    listed = _add_verb(verbs, "ls", "list facts by id, or users without --user", _list, is_needed=False)
    _add_at(listed)
    forget = _add_verb(verbs, "forget", "remove facts from all files of the memory", _forget)
    text = "only the fact of this id, which ls shows; may be repeated (default: everything of the user)"
    add_option(forget, "--id", "N", text, positive, action="append")
    export = _add_verb(verbs, "export", "write all facts as JSON lines", _export)
    add_option(export, "--out", "FILE", "write to a file (default: stdout)", Path)
    imported = _add_verb(verbs, "import", "read facts that export wrote", _import)
    imported.add_argument("lines", metavar="FILE", help="JSON lines; - is stdin")
    evaluation = memory_eval.add_parser(verbs)
    _add_whose(evaluation, is_needed=False)


def _add_verb(verbs: Subparsers, name: str, text: str, run: Any, *, is_needed: bool = True) -> Parser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    _add_whose(parser, is_needed=is_needed)
    add_json_option(parser)
    parser.set_defaults(run=run)
    return parser


def _add_whose(parser: argparse.ArgumentParser, *, is_needed: bool) -> None:
    add_option(parser, "--user", "NAME", "whose facts", nonempty, required=is_needed)
    add_option(parser, "--tenant", "NAME", "the user's tenant: the name of an API key of kvfold serve", default="")
    add_option(parser, "--file", "FILE", "the SQLite file (default: memory/memory.db under KVFOLD_HOME)", Path)
    text = "vectors that compare facts: auto, potion, minilm, hashed, a folder"
    add_option(parser, "--embedder", "NAME", text, nonempty, "auto")


def _add_at(parser: argparse.ArgumentParser) -> None:
    text = "as it was on that day, e.g. 2026-03-01"
    add_option(parser, "--at", "DATE", text, checked(lambda text: parse_date(text, is_end=True)))


def _open(args: argparse.Namespace, *, may_be_new: bool = False) -> Memory:
    """A file that was named must be there, unless the verb writes facts."""
    from kvfold.memory.memory import Memory  # here: help comes without numpy

    if not may_be_new:
        _check_file(args.file)
    return Memory(args.file, args.user, tenant=args.tenant, embedder=args.embedder)


def _check_file(path: Path | None) -> None:
    if path is not None and not path.expanduser().exists():
        raise FileError(f"the memory {path} does not exist; name the file that facts were added to")


def _add(args: argparse.Namespace) -> int:
    text = read_document("-") if args.text == "-" else args.text
    with _open(args, may_be_new=True) as memory:
        written = memory.write(text, source=args.source, at=args.at)
    if args.json:
        print_json([{**one.fact.to_json(), "ends": [old.to_json() for old in one.ended]} for one in written])
    else:
        if written:
            _print_facts([one.fact for one in written])
        for old in (old for one in written for old in one.ended):
            text, begin = show.visible(" ".join(old.text.split())), day_text(old.valid_from)
            print(f"ends: {text} (fact {old.id}, valid from {begin})")
        print(f"{counted(len(written), 'fact')} written")
        if not written:
            print("questions, code, single words and what is known already are not written", file=sys.stderr)
    return 0


def _ask(args: argparse.Namespace) -> int:
    if args.kv_prefix and args.model is None:
        raise InputError("--kv-prefix keeps what a model has read; give one with --model")
    policy = parse_policy(args.policy)
    with _open(args) as memory:
        found = memory.recall(args.question, at=args.at, top=args.top, abstain=not args.closest)
        answer = None if args.model is None or not found else _answer(args, memory, found, policy)
    if args.json:
        facts = [{**one.fact.to_json(), "score": round(one.score, 6)} for one in found]
        print_json(facts if args.model is None else {"answer": answer, "facts": facts})
    elif not found:
        print(f"nothing near this question is known of {args.user}", file=sys.stderr)
    elif answer is None:
        _print_facts([one.fact for one in found])
    else:
        print(answer)
    return 0


def _answer(args: argparse.Namespace, memory: Memory, found: Sequence[Recalled], policy: Policy) -> str:
    """The model's, from the recalled facts, or from the stored prefix and those that it lacks."""
    from kvfold.memory.prefix import StoredPrefix
    from kvfold.memory.render import render
    from kvfold.session import Session

    model = load_model(args)
    with show.waiting("answer"):
        if args.kv_prefix:
            prefix = StoredPrefix(memory, model, policy)
            return prefix.ask(args.question, [one.fact for one in found], max_new_tokens=args.max_new_tokens).text
        with Session(model, policy) as session:
            session.extend(render(one.fact for one in found))
            return session.ask(args.question, max_new_tokens=args.max_new_tokens).text


def _list(args: argparse.Namespace) -> int:
    if args.user is None and args.at is not None:
        raise InputError("--at shows the facts of a user as they were; give --user, too")
    if args.user is None:
        return _list_users(args)
    with _open(args) as memory:
        facts = memory.facts(at=args.at)
    if args.json:
        print_json([fact.to_json() for fact in facts])
    else:
        _print_facts(facts)
    return 0


def _list_users(args: argparse.Namespace) -> int:
    from kvfold.memory.memory import file_of
    from kvfold.memory.store import FactStore

    _check_file(args.file)
    store = FactStore(file_of(args.file))
    found = store.owners(args.tenant)
    store.close()
    if args.json:
        print_json([{"user": user, "facts": count} for user, count in found])
        return 0
    table = Table("user", numbers=("facts",))
    for user, count in found:
        table.add(user, f"{count:,}")
    table.print()
    return 0


def _forget(args: argparse.Namespace) -> int:
    with _open(args) as memory:
        count = memory.forget(args.id)
    if args.json:
        print_json({"forgotten": count})
    else:
        print(f"{counted(count, 'fact')} forgotten")
    return 0


def _export(args: argparse.Namespace) -> int:
    from kvfold.memory.jsonl import to_lines

    if args.out is not None:
        check_out(args.out)
    with _open(args) as memory:
        if args.out is not None and _is_of(args.out, memory.store.path):
            raise InputError(f"{args.out} is the memory itself; write the export to another file")
        facts = memory.facts()
    if args.out is None:
        sys.stdout.write(to_lines(facts))
        return 0
    write_whole(args.out, to_lines(facts), private=True)
    if args.json:
        print_json({"exported": len(facts), "file": str(args.out)})
    else:
        print(f"{counted(len(facts), 'fact')} written to {args.out}")
    return 0


def _is_of(path: Path, memory: Path) -> bool:
    """Whether a path is a memory's file or one that SQLite makes beside it."""
    beside = [memory.with_name(f"{memory.name}{end}") for end in ("", "-wal", "-shm", "-journal")]
    return path.resolve() in beside or (path.exists() and path.samefile(memory))


def _import(args: argparse.Namespace) -> int:
    lines = read_document(args.lines)
    with _open(args, may_be_new=True) as memory:
        count = memory.load(lines)
    if args.json:
        print_json({"imported": count})
    else:
        print(f"{counted(count, 'fact')} imported")
    return 0


def _print_facts(facts: Sequence[Fact]) -> None:
    table = Table("from", "to", "fact", numbers=("id",))
    for fact in facts:
        end = "" if fact.valid_to is None else day_text(fact.valid_to)
        table.add(day_text(fact.valid_from), end, fact.text, str(fact.id))
    table.print()
