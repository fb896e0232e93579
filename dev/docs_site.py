"""Hooks of mkdocs.yml: pages that are made while the site is built, so that they cannot be out of date.

- docs/reference/cli.md gets a section for every command, made from its argument parser.
- docs/changelog.md and docs/contributing.md get the texts of CHANGELOG.md and CONTRIBUTING.md, with links as they are
  from docs/.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLI_MARK = "<!-- commands -->"
INCLUDED = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md"}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """What mkdocs calls with the text of every page."""
    if page.file.src_uri == "reference/cli.md":
        return markdown.replace(CLI_MARK, cli_sections())
    if page.file.src_uri in INCLUDED:
        return markdown.replace(f"<!-- {page.file.src_uri.removesuffix('.md')} -->", included(page.file.src_uri))
    return markdown


def included(page: str) -> str:
    """The file of the root that a page shows, without its title."""
    _, _, text = (ROOT / INCLUDED[page]).read_text(encoding="utf-8").partition("\n")
    return text.replace("](docs/", "](").strip()


def cli_sections() -> str:
    """Every command of `kvfold` with its options, as Markdown."""
    from kvfold.cli.main import build_parser

    parser = build_parser()
    return "\n".join([*_options(parser), *_commands(parser)])


def _commands(parser: argparse.ArgumentParser, level: int = 2) -> Iterator[str]:
    """The subcommands of a parser, and theirs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, command in action.choices.items():
                yield from _command(command, helps.get(name, ""), level)


def _command(parser: argparse.ArgumentParser, help_text: str, level: int) -> Iterator[str]:
    yield f"\n{'#' * level} `{parser.prog}`\n"
    yield f"{_sentence(parser.description or help_text)}\n"
    yield f"```text\n{_usage(parser)}\n```\n"
    yield from _options(parser)
    if parser.epilog:
        yield _epilog(parser.epilog)
    yield from _commands(parser, level + 1)


def _usage(parser: argparse.ArgumentParser) -> str:
    """One line, whatever the width of a terminal."""
    words = [parser.prog]
    for action in parser._actions:
        if action.option_strings and action.required:
            words.append(_invocation(action))
        elif not action.option_strings:
            words.append(_positional(action))
    has_options = any(action.option_strings and not action.required for action in parser._actions)
    return " ".join([*words, "[options]"] if has_options else words)


def _positional(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    return f"[{name}]" if action.nargs in ("?", "*") else name


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A table for each group of options that has any."""
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if _is_shown(action)]
        if not actions:
            continue
        if group.title not in ("positional arguments", "options"):
            yield f"**{_sentence(group.title or '').rstrip('.')}**\n"
        yield "| Argument | What it does |\n| --- | --- |"
        for action in actions:
            yield f"| `{_cell(_invocation(action))}` | {_cell(_help(parser, action))} |"
        yield ""


def _is_shown(action: argparse.Action) -> bool:
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not hidden and action.help != argparse.SUPPRESS


def _invocation(action: argparse.Action) -> str:
    """`--policy POLICY`, as it is typed."""
    if not action.option_strings:
        return str(action.metavar or action.dest)
    name = ", ".join(action.option_strings)
    if action.nargs == 0:
        return name
    metavar = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else None)
    words = metavar if isinstance(metavar, tuple) else (metavar or action.dest.upper(),)
    value = " ".join(words)
    return f"{name} [{value}]" if action.nargs == "?" else f"{name} {value}"


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    text = (action.help or "") % {**vars(action), "prog": parser.prog}
    return _sentence(text)


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    text = text[:1].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "?", ":")) else f"{text}."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;") if "`" not in text else text.replace("|", "\\|")


def _epilog(text: str) -> str:
    head, _, rest = text.strip().partition("\n")
    if head.rstrip(":") == "examples":
        lines = [line.removeprefix("  ") for line in rest.splitlines()]
        return "Examples:\n\n```text\n" + "\n".join(lines).rstrip() + "\n```\n"
    return " ".join(text.split()) + "\n"
