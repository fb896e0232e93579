"""The registry, filled and with the default of every axis.

A variant registers itself when its module is imported. The first use of the language imports the module of every axis
by name: an expression means the same whatever its caller has imported, while static imports still point from the axes
to here.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from kvfold.plugins import load_plugins
from kvfold.policy.registry import AXES, find

if TYPE_CHECKING:
    from kvfold.policy.size import Size
    from kvfold.score.base import Scorer
    from kvfold.triggers import Trigger

NAMES = {
    "score": "full",
    "budget": "uniform",
    "protect": "protect",
    "evicted": "drop",
    "position": "keep",
    "codec": "native",
    "attend": "all",
    "prefill": "dense",
}
PHASES = ("prefill", "decode")
_MODULES = {"when": "triggers", "prefill": "token_pruning"}  # of axes whose module has another name


@cache
def load_variants() -> None:
    """Import the module of every axis that has one (sizes have none), then the terms of other packages."""
    for axis in AXES:
        module = f"kvfold.{_MODULES.get(axis, axis)}"
        if find_spec(module) is not None:
            import_module(module)
    load_plugins("kvfold.terms")


def named(name: str) -> Any:
    """A registered variant with its default arguments."""
    load_variants()
    term = find(name)
    if term is None:
        raise LookupError(f'no term "{name}" is registered')
    return term.variant()


def default(axis: str) -> Any:
    """What stands on an axis that an expression leaves out."""
    return named(NAMES[axis])


def default_trigger(phase: str, score: Scorer, size: Size | None) -> Trigger:
    """A bound is a bound: absolute sizes hold while decoding and, for scorers that ask for it, between chunks."""
    is_bound = size is not None and size.is_absolute
    if phase == "prefill":
        trigger: Trigger = named(score.default_prefill_trigger if is_bound else "after_prefill")
    else:
        trigger = named("on_overflow" if is_bound else "never")
    return trigger
