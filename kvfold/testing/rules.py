"""A rule that does not hold is an AssertionError, whatever Python's options, and its text is the rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def require(holds: object, rule: str) -> None:
    if not holds:
        raise AssertionError(rule)


def attempt(call: Callable[..., _Result], *arguments: Any, rule: str) -> _Result:
    """The result of a call that must not raise."""
    try:
        return call(*arguments)
    except Exception as error:
        raise AssertionError(f"{rule}; it raised {type(error).__name__}: {error}") from error


def require_term(given: object, base: type[Any]) -> None:
    """An instance of a frozen dataclass that derives from the base class of its axis."""
    kind = type(given).__name__
    if isinstance(given, type):
        raise AssertionError(f"give an instance, {given.__name__}(...), not the class {given.__name__}")
    require(isinstance(given, base), f"{kind} must derive from {base.__module__}.{base.__name__}")
    frozen = dataclasses.is_dataclass(given) and getattr(type(given), "__dataclass_params__").frozen  # noqa: B009
    require(frozen, f"{kind} must be a frozen dataclass: its fields are the arguments of the term")


def require_docstring(given: object) -> None:
    kind = type(given).__name__
    documented = given.__doc__ and not given.__doc__.startswith(f"{kind}(")  # what a dataclass writes by itself
    require(documented, f"{kind} must have a docstring: `kvfold policies` prints its first sentence")
