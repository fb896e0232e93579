"""`kvfold shorten`: print a shorter text, or the text with what would go greyed out."""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from kvfold.atomic_io import write_whole
from kvfold.cli import show
from kvfold.cli.options import (
    Subparsers,
    add_document_parser,
    add_json_option,
    add_model_options,
    add_option,
    check_out,
    load_model,
    nonempty,
    read_document,
)
from kvfold.errors import InputError

if TYPE_CHECKING:
    from kvfold.shortening.shorten import Shortened

_EPILOG = """examples:
  kvfold shorten report.txt --to 25%                            what says most of the text, in a quarter of its tokens
  kvfold shorten report.txt --to 2000tok --ask "Who paid?"      what answers the question, in 2000 tokens
  kvfold shorten report.txt --to 8x --keep numbers,code --show  the whole text, with what goes greyed out
  kvfold shorten report.txt --to 4x --html shortened.html       the same as a page
  cat report.txt | kvfold shorten - --to 4x | kvfold run --context - --ask "Who paid?"

Selectors: graph (no question), rank (needs --ask), keyphrases, words, topics (in the model's own words), and the
baselines head, tail, ends, shuffle; kvfold policies graph explains one. What is left is made of whole parts of the text
in their order, unless topics writes it. Without a model, words and marks are counted as tokens.
"""
_STYLE = """
body { max-width: 48em; margin: 2em auto; padding: 0 1em; font: 16px/1.5 system-ui, sans-serif; white-space: pre-wrap }
del { color: #999; text-decoration: none }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee } del { color: #666 } }
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = add_document_parser(
        subparsers,
        "shorten",
        run,
        "the text",
        help="cut a text to the parts that matter",
        description="Cut a text to the parts that matter, before a model reads it.",
        epilog=_EPILOG,
    )
    add_option(parser, "--to", "SIZE", "25%%, 4x or 2000tok", nonempty, required=True)
    add_option(parser, "--ask", "QUESTION", "keep what answers this question", nonempty)
    add_option(parser, "--by", "SELECTOR", "which parts stay (default: rank with --ask, else graph)", nonempty)
    add_option(parser, "--keep", "KINDS", "what always stays, e.g. numbers,code,quotes,headings; all; none", nonempty)
    add_option(parser, "--units", "CHUNKER", "how the text is parted, e.g. sentences, fixed(200)", nonempty)
    add_option(
        parser, "--embedder", "NAME", "vectors that compare parts: auto, potion, minilm, tfidf, a folder", nonempty
    )
    parser.add_argument("--show", action="store_true", help="print the whole text with what goes greyed out")
    add_option(parser, "--html", "FILE", "write that as a page", Path)
    add_json_option(parser)
    add_model_options(parser, needed=False)


def run(args: argparse.Namespace) -> int:
    """Shorten and print; arguments and files are checked before a model is loaded."""
    from kvfold.models.loader import load_tokenizer
    from kvfold.shortening.loaded_model import judge
    from kvfold.shortening.shorten import shorten_text  # here: help comes without numpy
    from kvfold.shortening.text import plan_of

    plan = plan_of(args.by or ("rank" if args.ask else "graph"), args.to, args.keep, args.units, args.embedder)
    if plan.by.needs_question and not args.ask:
        raise InputError(f"--by {args.by} keeps what answers a question; give one with --ask, or use --by graph")
    if args.ask and not plan.by.needs_question:
        raise InputError(f"--by {args.by} reads no question; leave --ask out, or use --by rank")
    if args.rope is not None and not plan.by.needs_model:
        raise InputError("--rope makes the window of a model longer, and none reads this text; leave it out")
    if args.html is not None:
        check_out(args.html, args.file)
    text = read_document(args.file)
    model = load_model(args) if plan.by.needs_model else None
    counting = args.model if model is None else None
    tokenizer = load_tokenizer(counting) if counting else model and model.tokenizer
    with show.bar("shorten", 100, "%") as advance:
        found = shorten_text(
            text, plan, question=args.ask, tokenizer=tokenizer, model=judge(plan, model), progress=_steps(advance)
        )
    if args.html is not None:
        write_whole(args.html, _page(found))
    _print(found, args, tokenizer is not None)
    return 0


def _steps(advance: Any) -> Any:
    """Progress of a selector, units done of all units, in percent of the one bar."""
    done = 0

    def report(count: int, total: int) -> None:
        nonlocal done
        percent = 100 * count // max(1, total)
        advance(percent - done)
        done = percent

    return report


def _print(found: Shortened, args: argparse.Namespace, has_tokenizer: bool) -> None:
    if args.json:
        spans = [list(span) for span in found.spans]
        facts = {"num_tokens": found.num_tokens, "num_original_tokens": found.num_original_tokens}
        show.print_json({"text": found.text, **facts, "is_extractive": found.is_extractive, "spans": spans})
        return
    if args.show:
        Console(highlight=False, soft_wrap=True).print(_marked(found), end="")
    elif args.html is None:
        sys.stdout.write(found.text)
    counted = "tokens" if has_tokenizer else "words and marks"
    how = "" if found.is_extractive else ", in the model's own words"
    counts = f"{found.num_original_tokens:,} -> {found.num_tokens:,} {counted}"
    print(f"{counts} ({found.ratio:.1f}x){how}, {found.seconds:.1f} s", file=sys.stderr)


def _pieces(found: Shortened) -> list[tuple[str, bool]]:
    """All of the text in order, and whether each piece stays."""
    pieces, at = [], 0
    for start, end in found.spans:
        pieces += [(found.original[at:start], False), (found.original[start:end], True)]
        at = end
    return [piece for piece in [*pieces, (found.original[at:], False)] if piece[0]]


def _marked(found: Shortened) -> Text:
    """On a terminal what goes is dim; elsewhere it stands between [- and -]."""
    marked = Text()
    for piece, stays in _pieces(found):
        if stays or sys.stdout.isatty():
            marked.append(piece, None if stays else "dim")
        else:
            marked.append(f"[-{piece}-]")
    return marked


def _page(found: Shortened) -> str:
    body = "".join(escape(piece) if stays else f"<del>{escape(piece)}</del>" for piece, stays in _pieces(found))
    counts = f"{found.num_original_tokens:,} to {found.num_tokens:,} tokens"
    title = f'<meta charset="utf-8"><title>Shortened: {counts}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en">{title}<body><p><b>{counts}</b></p>{body}</body></html>\n'
