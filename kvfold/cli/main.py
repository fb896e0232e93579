"""The command `kvfold`: subcommands and exit codes.

    0    done
    1    out of KV pages, closed output pipe, or `cache verify` found damage
    2    bad input: arguments, policy, model, file
    130  interrupted with Ctrl-C

An error is one line on stderr that starts with `error:`; a warning starts with `warning:` and is printed once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from kvfold import __version__
from kvfold.cli import (
    bench,
    cache,
    chat,
    completion,
    demo,
    env,
    memory,
    models,
    new,
    pack,
    policies,
    read,
    report,
    run,
    serve,
    shorten,
)
from kvfold.cli.options import Parser
from kvfold.cli.training import calibrate, fit_prompt, label, profile, train_scorer
from kvfold.errors import KvfoldError, KvfoldWarning, OutOfPages
from kvfold.models.pull.pull import HOME_HELP
from kvfold.plugins import VARIABLE
from kvfold.serve.ops.json_output import json_output

_TEXTS = (run, chat, read, shorten, memory)
_FITTING = (fit_prompt, label, train_scorer, profile, calibrate)
COMMANDS = (*_TEXTS, serve, cache, pack, demo, bench, report, models, policies, new, *_FITTING, env, completion)
_ADVICE = "raise {}, use a policy that keeps less, or shorten the text"
_EPILOG = f"""examples:
  kvfold demo                                      KV cache compression on a small model, in minutes on any CPU
  kvfold run --context notes.txt --ask "Who wrote this?" --policy "keydiff + 4x" --compare full,int4
  kvfold chat --policy "streaming + 1024tok + slot"
  kvfold read report.txt --ask "Who paid?"         texts of any length, with quotes and their places
  kvfold shorten report.txt --to 25% --ask "Who paid?"
  kvfold label notes.txt --out labels.safetensors  top-k log-probabilities of a text, for distillation
  kvfold memory add --user anna "I live in Berlin."
  kvfold serve --policy "keydiff + 4x"             for clients of Anthropic's and OpenAI's APIs
  kvfold cache stats --disk prefixes               contents of a server's prefix cache, also while it runs
  kvfold policies "snapkv + ada + 8x + int4"       explain a policy
  kvfold bench                                     compare policies at equal bytes, with a table and a report
  kvfold models pull smollm2-135m

Output: tables on a terminal; in a pipe one row per line with a tab between columns; JSON with --json. Progress and
errors go to stderr. Exit codes: 0 done, 1 out of KV-cache memory or damage found, 2 bad input, 130 Ctrl-C.

{HOME_HELP}
"""


def build_parser() -> Parser:
    """The whole command line."""
    description = "KV cache compression and prefix caching for language models."
    parser = Parser("kvfold", description=description, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"kvfold {__version__}")
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module or .py file that registers terms or workloads; may be repeated (also: KVFOLD_IMPORT=A,B)",
    )
    parser.set_defaults(run=None, parser=parser)  # the whole command line, for completion
    subparsers = parser.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    _never_fail_to_encode()
    with ExitStack() as output:
        return _run(argv, output)


def _run(argv: Sequence[str] | None, output: ExitStack) -> int:
    parser = build_parser()
    args = argparse.Namespace()
    try:
        args = parser.parse_args(argv)
        if args.run is None:
            parser.print_help()
            return 0
        if args.run is serve.run and args.log == "json":
            output.enter_context(json_output())
        with _plain_warnings():
            if args.imports:  # by the environment, so that processes which a command starts import them, too
                os.environ[VARIABLE] = ",".join(filter(None, (os.environ.get(VARIABLE), *args.imports)))
            args.words = list(sys.argv[1:] if argv is None else argv)  # for processes that a command starts
            code = int(args.run(args))
        sys.stdout.flush()  # here, where a closed pipe can still be handled
        return code
    except KvfoldError as error:
        advice = _ADVICE.format("--arena" if getattr(args, "run", None) is bench.run else "--memory")
        text = str(error).replace(OutOfPages.ADVICE, advice)
        print(f"error: {' '.join(text.split())}", file=sys.stderr)
        return 1 if isinstance(error, OutOfPages) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; redirect that to devnull.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print each KvfoldWarning once, in one line; others as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("once", KvfoldWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, KvfoldWarning):
                print(f"warning: {message}", file=sys.stderr)
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _never_fail_to_encode() -> None:
    """Characters that the terminal cannot encode become question marks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
