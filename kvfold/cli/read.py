"""`kvfold read`: answer a question about texts of any length, with quotes and the tree of parts that were read."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.atomic_io import write_whole
from kvfold.cli import show
from kvfold.cli.options import (
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
    whole_number,
)
from kvfold.cli.read_code import add_code_options, check_code_options, run_code
from kvfold.errors import FileError, InputError, OutOfPages
from kvfold.models.pull.pull import home_folder
from kvfold.plurals import counted
from kvfold.policy.size import bytes_text

if TYPE_CHECKING:
    from kvfold.recurse.context import Context
    from kvfold.recurse.journal import Journal
    from kvfold.recurse.reader import Reader
    from kvfold.recurse.result import ReadResult

_EPILOG = """examples:
  kvfold read report.txt --ask "Who paid for the bridge?"
  kvfold read part1.txt part2.txt --ask "When was it built?" --tree --html tree.html
  kvfold read report.txt --ask "What did it cost in all?" --verify
  kvfold read log.txt --ask "How many failures were there?" --code --model qwen2.5-coder-1.5b
  kvfold read log.txt --ask "What is the code?" --policy "snapkv + ada + 4x" --chunk 2000 --budget-seconds 60

A text that fits the trained window is read in one pass. A longer one is cut into parts between sentences; each is a
fork of one shared prefix, parts run in batches, and what they quote is read again, level by level, until one answer is
left. Every quote is in the text, at the offsets told; a reply that is not is dropped.

A run that was interrupted or killed goes on where it ended when the same command runs again.
"""


_PROMPTS = ("auto", "chat", "plain")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = subparsers.add_parser(
        "read",
        help="ask a question about texts of any length",
        description="Answer a question about texts of any length, with quotes and their places.",
        epilog=_EPILOG,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text; several are one text; - is stdin")
    add_option(parser, "--ask", "QUESTION", "the question", nonempty, required=True)
    add_option(parser, "--policy", "POLICY", "of the KV cache of every part; kvfold policies lists terms", str, "full")
    add_option(parser, "--chunk", "TOKENS", "tokens of a part, or auto: what window and memory allow", _chunk, "auto")
    add_option(parser, "--max-new-tokens", "N", "maximum tokens of a reply", positive, 32)
    add_option(parser, "--batch", "N", "parts decoded together at most (default: 16, on a GPU 64)", positive)
    text = "a turn of the chat template, or plain text with examples; auto: chat from 0.5B parameters on"
    parser.add_argument("--prompts", choices=_PROMPTS, default="auto", help=text)
    text = "draft replies by n-gram lookup in their part, up to N tokens, and verify drafts in one pass"
    parser.add_argument("--speculate", nargs="?", type=positive, const=True, default=False, metavar="N", help=text)
    text = "read N parts again with the full cache and one by one, to measure quality and throughput against that"
    add_option(parser, "--measure", "N", text, positive)
    bounds = parser.add_argument_group("bounds", "out of budget, the best answer so far is given, and marked as such")
    add_option(bounds, "--depth", "N", "levels at most", positive, 5)
    add_option(bounds, "--budget-calls", "N", "calls of the model at most", positive)
    add_option(bounds, "--budget-tokens", "N", "tokens read and generated at most", positive)
    add_option(bounds, "--budget-seconds", "S", "seconds at most, looked at between batches", _seconds)
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check quotes and arithmetic of every reply; ask again where they are wrong",
    )
    parser.add_argument("--tree", action="store_true", help="print every part with what was found in it")
    add_option(parser, "--html", "FILE", "write the tree as a page", Path)
    add_option(parser, "--resume", "FILE", "journal to go on from, and to write (default: under KVFOLD_HOME)", Path)
    add_code_options(parser)
    add_json_option(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


@checked
def _chunk(text: str) -> int | str:
    if text == "auto":
        return text
    number = whole_number(text)
    if number is None or number < 1:
        raise InputError(f'"{text:.40}" is no number of tokens; write a whole number from 1 on, or auto')
    return number


@checked
def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise InputError(f'"{text}" is no number of seconds; write one above 0')
    return found


def run(args: argparse.Namespace) -> int:
    """Read and print; arguments, files and the question are checked before the model is loaded."""
    from kvfold.recurse.budget import Budget  # here: help comes without torch
    from kvfold.recurse.prompts import check_question
    from kvfold.recurse.reader import Reader
    from kvfold.recurse.verified_reader import VerifiedReader

    check_code_options(args)
    policy, context = parse_policy(args.policy), _context(args.files)
    check_question(context.fill(args.ask))
    _check_places(args)
    budget = Budget(args.depth, args.budget_calls, args.budget_tokens, args.budget_seconds)
    if args.code:
        return run_code(args, context, policy, budget)
    model = load_model(args)
    kind = VerifiedReader if args.verify else Reader
    with (
        kind(
            model,
            context,
            args.ask,
            policy,
            chunk=args.chunk,
            budget=budget,
            max_new_tokens=args.max_new_tokens,
            width=args.batch,
            speculate=args.speculate,
            prompts=args.prompts,
        ) as reader,
        _journal(args, reader) as journal,
    ):
        reader.resume(journal)
        result = _read(reader, args)
        if args.measure and result.stopped_by != "interrupt":
            result = _measured(reader, result, args.measure)
        _print(result, args)
        if result.is_complete and args.resume is None:  # behind what may fail
            journal.remove()
    return 130 if result.stopped_by == "interrupt" else 0


def _context(names: list[str]) -> Context:
    from kvfold.recurse.context import Context

    if names.count("-") > 1:
        raise InputError("stdin (-) can be read once; name it once")
    return Context.of_files([("stdin" if name == "-" else _shown(name), read_document(name)) for name in names])


def _shown(name: str) -> str:
    """A file's name, which need not be UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def _check_places(args: argparse.Namespace) -> None:
    """FileError for a page or journal that cannot be written, or would be written over something else."""
    taken = [Path(name) for name in args.files if name != "-"]
    for option, path in (("--html", args.html), ("--resume", args.resume)):
        if path is None:
            continue
        check_out(path)
        if path.resolve() in [other.resolve() for other in taken]:
            raise FileError(f"{option} names {path}, which this command reads or writes already; name another file")
        taken.append(path)


def _journal(args: argparse.Namespace, reader: Reader) -> Journal:
    from kvfold.recurse.journal import Journal, remove_old

    key, folder = reader.run_key, home_folder() / "read"
    remove_old(folder, time.time())
    return Journal.open(args.resume or folder / f"{key[:16]}.jsonl", key)


def _read(reader: Reader, args: argparse.Namespace) -> ReadResult:
    """The result, or what there is of it at Ctrl-C."""
    count = len(reader.pieces)
    if not args.json:
        print(
            f"{counted(count, 'part')} of at most {counted(reader.chunk_tokens, 'token')}" if count > 1 else _PLAIN,
            file=sys.stderr,
        )
    with show.bar(f"read {counted(count, 'part')}", reader.num_tokens, "tokens") as progress:
        try:
            return reader.read(progress=progress)
        except KeyboardInterrupt:
            return reader.result(interrupted=True)


def _measured(reader: Reader, result: ReadResult, count: int) -> ReadResult:
    """With what parts that are read again tell. An answer that is there is not lost if they cannot be read again."""
    from kvfold.recurse.measure import measured

    try:
        with show.waiting(f"measure on {counted(count, 'part')}"):
            return replace(result, kv=measured(reader, result.kv, count))
    except KeyboardInterrupt:
        reason = "interrupted"
    except OutOfPages:
        reason = "a part does not fit into the KV-cache memory without the policy; use a smaller --chunk"
    print(f"not measured: {reason}", file=sys.stderr)
    return result


_PLAIN = "the text fits the trained window: one plain pass, no tree"


def _print(result: ReadResult, args: argparse.Namespace) -> None:
    from kvfold.recurse.tree_html import tree_page

    if args.html is not None:
        write_whole(args.html, tree_page(result, args.ask))
    if args.json:
        show.print_json({"question": args.ask, **result.as_json()})
        return
    print(show.visible(result.text) or "nothing found")
    for quote in result.quotes:
        print(show.visible(f'  "{" ".join(quote.text.split())}" {quote.place}'))
    if args.tree or result.stopped_by == "interrupt":
        print(show.visible(f"\n{result.tree}"))
    print(_summary(result), file=sys.stderr)


def _summary(result: ReadResult) -> str:
    usage, kv = result.usage, result.kv
    parts = [
        counted(usage.calls, "call"),
        f"{counted(usage.tokens_read, 'token')} read",
        f"{usage.tokens_shared:,} shared",
    ]
    if result.num_resumed:
        parts.append(f"{counted(result.num_resumed, 'call')} resumed")
    if result.num_dropped:
        parts.append(f"{counted(result.num_dropped, 'reply')} not in the text, dropped (--tree shows them)")
    if result.num_cut:
        parts.append(f"{counted(result.num_cut, 'reply')} cut at the token limit (--max-new-tokens)")
    if result.checks is not None:
        parts.append(_checked(result.checks))
    if kv.compression_ratio is not None and kv.resident_bytes is not None:
        parts.append(f"KV caches {bytes_text(kv.resident_bytes)} ({kv.compression_ratio:.2f}x)")
    if kv.quality_retention is not None and kv.throughput_gain is not None:
        parts.append(f"{kv.quality_retention:.0%} of answers as with the full cache")
        parts.append(f"{kv.throughput_gain:.1f}x as fast as one by one")
    if kv.speculative_speedup is not None:
        parts.append(f"decoding {kv.speculative_speedup:.2f}x as fast with drafts")
    line = f"{', '.join(parts)}, {result.seconds:.1f} s"
    if result.stopped_by == "interrupt":
        return f"interrupted with {counted(result.num_unread, 'part')} unread; the same command goes on\n{line}"
    if result.stopped_by is not None:
        unread = f"; unread: {counted(result.num_unread, 'part')}" if result.num_unread else ""
        return f"the best answer so far: the budget of {result.stopped_by} is spent{unread}\n{line}"
    return line


def _checked(checks: dict[str, Any]) -> str:
    refusal = checks["answer_refusal"]
    of, retries = counted(checks["checked"], "reply"), counted(checks["retries"], "retry")
    told = f"{checks['refused']:,} of {of} refused by checks"
    told += f", {checks['recovered']:,} passed after {retries}" if checks["refused"] else ""
    return told + (f", answer refused: {refusal}" if refusal else "")
