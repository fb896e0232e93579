"""Regular expressions that read texts of users take time linear in the text: one that is quadratic on some text holds
Python's lock for minutes, and a server with it."""

from __future__ import annotations

import multiprocessing
import pkgutil
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from types import ModuleType

import pytest

import kvfold.memory
import kvfold.recurse
import kvfold.shortening
from kvfold.errors import SizeError
from tests.shortening.texts import PROSE

LENGTH = 40_000  # characters: linear patterns take milliseconds, quadratic ones minutes
FILLERS = ["a", "_", "-", "1.", "a-", "\n", " ", '"', "1", "a@", ". ", "<", "\n ", "a ", "A: ", "=", "'s", "…", "|"]
AROUND = ["{}", "```{}x", "The cat. {}é", "- [1] A1:{}", "<what 1{}\n"]  # behind and before what patterns look for
ANCHORED = {  # called by match, fullmatch or on what a bound keeps short; others are searched for all over a text
    "kvfold.memory.statement": {"_LEAD_IN", "_WHEN"},
    "kvfold.recurse.locate": {"_NOTHING"},
    "kvfold.shortening.parts": {"_FENCE", "_HEADING", "_UNDERLINE", "_ITEM", "_ROW", "_TITLE"},
}
WITHIN = 20  # seconds of CPU time, which other processes do not take from it


def modules() -> Iterator[ModuleType]:
    for package in (kvfold.shortening, kvfold.memory, kvfold.recurse):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield import_module(found.name)


def patterns() -> Iterator[tuple[str, str, re.Pattern[str]]]:
    """Module, name and pattern of all that stand in a module, also in a dictionary of it."""
    for module in modules():
        for name, value in vars(module).items():
            inside = value.values() if isinstance(value, dict) else (value,)
            for pattern in inside:
                if isinstance(pattern, re.Pattern):
                    yield module.__name__, name, pattern


def read_all(around: str) -> None:
    """Every pattern over every text."""
    for module, name, pattern in patterns():
        for filler in FILLERS:
            text = around.format(filler * (LENGTH // len(filler)))
            pattern.match(text)
            if name not in ANCHORED.get(module, ()):
                pattern.sub("", text)


def ends_in_time(function: Callable[[str], None], argument: str) -> bool:
    """Whether a call ends: in a process of its own, since a pattern cannot be interrupted."""

    def bounded() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (WITHIN, WITHIN))
        function(argument)

    process = multiprocessing.get_context("fork").Process(target=bounded)
    process.start()
    process.join()
    return process.exitcode == 0


def test_all_patterns_are_found() -> None:
    found = {f"{module}.{name}" for module, name, _ in patterns()}
    assert len(found) > 30 and {"kvfold.shortening.protected._PATTERNS", "kvfold.recurse.arithmetic._TOKEN"} <= found
    assert {f"{module}.{name}" for module, names in ANCHORED.items() for name in names} <= found


@pytest.mark.parametrize("around", AROUND)
def test_patterns_take_linear_time(around: str) -> None:
    assert ends_in_time(read_all, around)


def shorten_all(around: str) -> None:
    """Texts of one long run, behind sentences that could stay."""
    for filler in FILLERS:
        text = PROSE + around.format(filler * (LENGTH // len(filler)))
        with suppress(SizeError):  # of some too much must stay
            kvfold.shorten(text, "4x", keep="all", embedder="tfidf")


def test_texts_of_one_long_run_are_shortened_in_linear_time() -> None:
    assert ends_in_time(shorten_all, "{}\nWhat is it?")
