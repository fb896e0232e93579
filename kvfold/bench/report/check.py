"""Values of a run's files against the types that `kvfold.bench.record` declares.

A folder may come from anywhere, and JSON holds anything; a value of the wrong kind is named here, before it surfaces as
nonsense in a page. Numbers are finite, counts are not negative, and scores lie between 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvfold.bench.record import Diagnostic, PromptRow, Recorded, Row, Run
from kvfold.errors import InputError

_COUNTS = ("length", "index", "prompt_tokens", "new_tokens", "resident_bytes", "full_bytes", "bytes_per_step")
_BY_LAYER = ("hit_rate", "mass_kept", "share_kept")
_TYPES: Mapping[type, Mapping[str, Any]] = {kind: get_type_hints(kind) for kind in (Run, Row, PromptRow, Diagnostic)}
_MOST_TOLD = 200  # characters of values that may be of any size


def check(folder: Path, recorded: Recorded) -> None:
    """InputError for the first part with a wrong value."""
    parts: Iterable[Run | Row | PromptRow | Diagnostic] = (
        recorded.run,
        *recorded.rows,
        *recorded.prompts,
        *recorded.diagnostics,
    )
    for part in parts:
        wrong = wrong_fields(part)
        if wrong:
            told = ", ".join(f"{name} {getattr(part, name)!r}" for name in wrong)[:_MOST_TOLD]
            kind = type(part).__name__
            raise InputError(f"{folder} holds a {kind} with {told}; give a folder that the benchmark wrote")


def wrong_fields(part: Run | Row | PromptRow | Diagnostic) -> list[str]:
    """Names of fields that cannot be so."""
    wrong = [name for name, kind in _TYPES[type(part)].items() if not _fits(getattr(part, name), kind)]
    if not wrong and isinstance(part, Row):
        return _impossible(part)
    if not wrong and isinstance(part, Diagnostic):
        return [name for name in _BY_LAYER if len(getattr(part, name)) != len(part.layers)]
    return wrong


def _fits(value: object, kind: Any) -> bool:
    """Of the types that records declare: tuples are all tuple[X, ...]."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, arguments[0]) for each in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(each, arguments[1]) for each in value.values())
    if kind is float:
        return _is_number(value, (int, float)) and math.isfinite(value)  # type: ignore[arg-type]
    return _is_number(value, (int,)) if kind is int else kind is Any or isinstance(value, kind)


def _is_number(value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _impossible(row: Row) -> list[str]:
    wrong = [name for name in _COUNTS if getattr(row, name) < 0]
    if row.score is not None and not 0 <= row.score <= 1:
        wrong.append("score")
    if row.score is not None and not row.full_bytes:
        wrong.append("full_bytes")
    return wrong
