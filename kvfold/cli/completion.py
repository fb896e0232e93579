"""`kvfold completion`: a script with which the shell completes commands, options and their values."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from kvfold.bench.suites import SUITES
from kvfold.cli.options import Subparsers
from kvfold.models.pull.pull import names_of

_SHELLS = ("bash", "zsh", "fish")
_FILES = ("FILE", "SESSION", "FIRST", "SECOND", "MODULE")  # metavars
_EPILOG = """examples:
  kvfold completion bash > ~/.local/share/bash-completion/completions/kvfold
  kvfold completion zsh > ~/.zfunc/_kvfold          with fpath+=~/.zfunc before compinit in ~/.zshrc
  kvfold completion fish > ~/.config/fish/completions/kvfold.fish

Start a new shell afterwards. Commands, options, choices, file names, model names and policy terms are completed.
"""


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a script for the completion of your shell",
        description="Print a script with which the shell completes the words of kvfold commands.",
        epilog=_EPILOG,
    )
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import shtab  # here: other commands come without it

    from kvfold.policy.describe import rows

    terms = tuple(row.name for row in rows())
    words = {"model": names_of("model"), "suite": tuple(SUITES), "expression": terms}
    words |= dict.fromkeys(("policy", "compare", "policies", "also"), terms)
    for action in _actions(args.parser):
        if action.dest in words:
            action.choices = words[action.dest]
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
        elif action.metavar == "DIR":
            action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.choices is not None and not isinstance(action, argparse._SubParsersAction):
            action.choices = tuple(action.choices)  # shtab takes a dictionary for subcommands
    print(shtab.complete(args.parser, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of the parser and its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                yield from _actions(sub)
