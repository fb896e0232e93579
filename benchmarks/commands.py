"""Benchmarks from the command line: `python -m benchmarks.NAME`, or `python -m benchmarks.FOLDER COMMAND`.

Commands of a folder are its modules that `COMMANDS` lists; each is imported when it is asked for, so that it decides
itself what it imports.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from kvfold.errors import KvfoldError

Main = Callable[[Sequence[str]], int | None]


def argument_parser(name: str, about: str | None) -> argparse.ArgumentParser:
    """`name`: what stands behind `python -m benchmarks.`; `about`: the docstring of the module."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m benchmarks.{name}", description=about, formatter_class=formatter)


def positive(text: str) -> int:
    """The type of an option that is a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is no whole number of at least 1')
    return number


def run_main(main: Main, arguments: Sequence[str]) -> int:
    """The exit code; an error of the package is one line."""
    try:
        return main(arguments) or 0
    except KvfoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run_command(package: str, arguments: Sequence[str]) -> int:
    """The command that the first argument names, with the others."""
    folder = import_module(package)
    known: Sequence[str] = folder.COMMANDS
    if not arguments or arguments[0] in ("-h", "--help"):
        width = max(map(len, known))
        lines = [f"    {name:<{width}}  {_question(folder.__file__, name)}" for name in known]
        print("\n".join([f"usage: python -m {package} COMMAND [OPTION …]", "", str(folder.__doc__), "", *lines, ""]))
        print(f"`python -m {package} COMMAND --help` shows the options of a command.")
        return 0 if arguments else 2
    if arguments[0] not in known:
        print(f'error: no command "{arguments[0]}"; commands: {", ".join(known)}', file=sys.stderr)
        return 2
    return run_main(import_module(f"{package}.{arguments[0]}").main, arguments[1:])


def _question(init: str | None, name: str) -> str:
    """The first line of a command's docstring."""
    assert init is not None
    source = Path(init).with_name(f"{name}.py").read_text(encoding="utf-8")
    return str(ast.get_docstring(ast.parse(source))).splitlines()[0]
