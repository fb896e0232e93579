"""One registration per workload, by decorator in its own file; runner, docs table and test matrix read this."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, TypeVar

from kvfold.bench.workloads.base import Workload
from kvfold.errors import InputError
from kvfold.plugins import load_plugins

_PACKAGE = "kvfold.bench.workloads"
_Kind = TypeVar("_Kind", bound=type[Workload])
_kinds: dict[str, type[Workload]] = {}


def workload(kind: _Kind) -> _Kind:
    """Class decorator: make a frozen dataclass known by its `name`."""
    known = _kinds.get(kind.name)
    if known is not None and (known.__module__, known.__qualname__) != (kind.__module__, kind.__qualname__):
        both = f"{known.__module__}.{known.__qualname__} and {kind.__module__}.{kind.__qualname__}"
        raise InputError(f'workload "{kind.name}" is registered twice, by {both}')
    if not is_dataclass(kind):
        raise InputError(f'workload "{kind.name}": {kind.__name__} must be a frozen dataclass')
    _kinds[kind.name] = kind
    return kind


def workloads() -> tuple[Workload, ...]:
    """Every workload with its default options, sorted by name."""
    kinds = _load()
    return tuple(kinds[name]() for name in sorted(kinds))


def find(name: str, **options: Any) -> Workload:
    """The workload of this name, with the options given."""
    kinds = _load()
    if name not in kinds:
        raise InputError(f'no workload "{name}"; workloads: {", ".join(sorted(kinds))}')
    allowed = [field.name for field in fields(kinds[name])]  # type: ignore[arg-type]  # checked when registered
    if unknown := sorted(set(options) - set(allowed)):
        raise InputError(f'workload {name} has no option "{unknown[0]}"; options: {", ".join(allowed) or "none"}')
    return kinds[name](**options)


def _load() -> dict[str, type[Workload]]:
    """Import every file beside this one: each registers what it defines."""
    for module in iter_modules(import_module(_PACKAGE).__path__):
        import_module(f"{_PACKAGE}.{module.name}")
    load_plugins("kvfold.workloads")
    return _kinds
