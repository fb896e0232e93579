"""`kvfold read --code`: the model writes Python that reads the text, in a sandbox."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from kvfold.cli import show
from kvfold.cli.options import add_option, load_model, positive
from kvfold.errors import InputError
from kvfold.plurals import counted

if TYPE_CHECKING:
    from kvfold.policy import Policy
    from kvfold.recurse.budget import Budget
    from kvfold.recurse.code_root import CodeAnswer
    from kvfold.recurse.context import Context

_TURNS = 20
_OF_THE_TREE = {
    **{"tree": False, "html": None, "resume": None, "chunk": "auto", "verify": False, "depth": 5},
    **{"speculate": False, "measure": None, "prompts": "auto"},
}


def add_code_options(parser: argparse.ArgumentParser) -> None:
    """`--code` and `--max-turns`."""
    group = parser.add_argument_group("code", "instead of a tree; needs kvfold[code] and a model that writes Python")
    group.add_argument(
        "--code", action="store_true", help="the model writes Python that slices the text and asks about slices"
    )
    add_option(group, "--max-turns", "N", f"replies with code at most (default: {_TURNS})", positive)


def check_code_options(args: argparse.Namespace) -> None:
    """InputError for options that would have no effect; MissingExtra before a model is loaded."""
    if not args.code:
        if args.max_turns is not None:
            raise InputError("--max-turns counts replies with code; add --code, or leave it out")
        return
    for name, default in _OF_THE_TREE.items():
        if getattr(args, name) != default:
            raise InputError(f"--{name} is for the tree of parts, which --code does not build; leave one of them out")
    from kvfold.recurse.sandbox import require_monty

    require_monty()


def run_code(args: argparse.Namespace, context: Context, policy: Policy, budget: Budget) -> int:
    """Read and print."""
    from kvfold.recurse.code_read import read_by_code

    model = load_model(args)
    options = {"max_new_tokens": args.max_new_tokens, "width": args.batch, "max_turns": args.max_turns or _TURNS}
    with show.waiting("the model writes code"):
        found = read_by_code(model, context, args.ask, policy, budget=budget, **options)
    if args.json:
        show.print_json({"question": args.ask, **found.as_json()})
        return 0
    print(show.visible(found.text) or "nothing found")
    print(_summary(found), file=sys.stderr)
    return 0


def _summary(found: CodeAnswer) -> str:
    usage, errors = found.usage, sum(bool(turn.error) for turn in found.turns)
    cost = f"{counted(usage.calls, 'call')}, {counted(usage.tokens, 'token')}"
    line = f"{counted(len(found.turns), 'turn')}, {errors} with errors, {cost}, {found.seconds:.1f} s"
    if found.stopped_by is None:
        return line
    bound = {"errors": "5 turns in a row failed", "window": "the root's window is full"}
    reason = bound.get(found.stopped_by, f"the budget of {found.stopped_by} is spent")
    return f"the best answer so far: {reason}\n{line}"
