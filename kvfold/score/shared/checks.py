"""Checks of scorer arguments and of the view's optional parts, with one wording for all scorers."""

from __future__ import annotations

from typing import TypeVar

from kvfold.errors import InputError, PolicyError

_Part = TypeVar("_Part")


def at_least(term: str, argument: str, value: float, least: float) -> None:
    if value < least:
        raise PolicyError(f"{term}({argument}={value}): {argument} must be at least {least}")


def one_of(term: str, argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise PolicyError(f"{term}({argument}={value}): {argument} must be one of {', '.join(allowed)}")


def given(term: str, part: _Part | None, name: str) -> _Part:
    """The part of the view that the scorer's `needs` asked for."""
    if part is None:
        raise InputError(f"{term} needs view.{name}, which is missing; provide what its `needs` declare")
    return part
