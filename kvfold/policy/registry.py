"""One registration per variant: the parser, the CLI, the docs table and the test matrix all read this.

A variant is a frozen dataclass whose fields are the arguments of its term; the first line of its docstring is
what `kvfold policies` prints. It is registered by decorator in its own file:

    @register("score", "keydiff", paper="arXiv:2504.15364", cost="L·d", published="as published")
    @dataclass(frozen=True)
    class KeyDiff(Scorer):
        ...

A variant registers itself when its module is imported. The first use of the language imports the module of every axis
by name: an expression means the same whatever its caller has imported, while static imports still point from the axes
to here.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from kvfold.errors import PolicyError
from kvfold.plugins import load_plugins

if TYPE_CHECKING:
    from kvfold.core import ModelSpec


AXES = (
    "score", "budget", "size", "when", "protect", "evicted", "position", "codec", "attend", "prefill",
    "shorten", "selector", "units",
)  # fmt: skip
_WORDS = ("prefill", "decode", "min", "max", "none")
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")
_Variant = TypeVar("_Variant")


class Term:
    """Base of every variant: the hooks that a policy calls on a term of any axis."""

    def validate(self) -> str | None:
        """Why its arguments cannot work, as the end of an error message; None if they can."""
        return None

    def check(self, spec: ModelSpec) -> None:
        """PolicyError if it does not fit this model. Default: it does."""

    @property
    def identity(self) -> str | None:
        """What stands for it in a fingerprint, for a term that reads a file; None: its own text."""
        return None


@dataclass(frozen=True)
class Registration:
    """A variant of one axis, registered under a name."""

    axis: str
    name: str
    variant: type[Any]
    revision: int
    paper: str
    cost: str
    published: str
    file: str | None  # that defined it; None in a notebook

    @property
    def place(self) -> str:
        """The class by its dotted name."""
        return f"{self.variant.__module__}.{self.variant.__qualname__}"

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.variant) or "").split("\n", 1)[0].strip()

    @property
    def arguments(self) -> tuple[dataclasses.Field[Any], ...]:
        return dataclasses.fields(self.variant)


_terms: dict[str, Registration] = {}


def register(
    axis: str, name: str, *, revision: int = 1, paper: str = "", cost: str = "none", published: str = ""
) -> Callable[[type[_Variant]], type[_Variant]]:
    """Class decorator: make a frozen dataclass the term `name` of `axis`. Raise `revision` when its results change.
    `published` says what the term is against its paper: "as published ..." or "differs: ...".

    A class of the same name in the same module and file takes the place of the earlier one, as when a cell of a
    notebook runs again; any other class under a name that is taken is refused."""
    if axis not in AXES:
        raise PolicyError(f'no axis "{axis}"; axes: {", ".join(AXES)}')
    check_name(name)

    def decorate(variant: type[_Variant]) -> type[_Variant]:
        term = Registration(axis, name, variant, revision, paper, cost, published, _file(variant))
        _refuse_another(term, _terms.get(name))
        is_frozen = dataclasses.is_dataclass(variant) and variant.__dataclass_params__.frozen  # type: ignore[attr-defined]
        if not is_frozen or not issubclass(variant, Term):
            raise PolicyError(f'term "{name}": {variant.__name__} must be a frozen dataclass that derives from Term')
        _terms[name] = term
        return variant

    return decorate


def check_name(name: str) -> None:
    """PolicyError if no term can have this name."""
    if name in _WORDS:
        raise PolicyError(f'"{name}" is a word of the language; choose another name for the term')
    if not _NAME.match(name):
        raise PolicyError(f'term name "{name}" must match [a-z][a-z0-9_]*')


def _refuse_another(term: Registration, known: Registration | None) -> None:
    if known is None or (known.place, known.file) == (term.place, term.file):
        return
    places = [known.place, term.place]
    if known.place == term.place:  # two files, imported under one name
        places = [f"{one.place} in {one.file or 'a notebook'}" for one in (known, term)]
    raise PolicyError(f'term "{term.name}" is registered twice, by {" and ".join(places)}; choose another name')


def _file(variant: type[Any]) -> str | None:
    """The file of the module that is being imported; later the module's name may stand for another file."""
    return getattr(sys.modules.get(variant.__module__), "__file__", None)


def terms(axis: str | None = None) -> tuple[Registration, ...]:
    """All registered terms, or those of one axis, in order of axis and name."""
    found = [term for term in _terms.values() if axis in (None, term.axis)]
    return tuple(sorted(found, key=lambda term: (AXES.index(term.axis), term.name)))


def find(name: str) -> Registration | None:
    return _terms.get(name)


def term_of(variant: object) -> Registration:
    """The registration of an instance."""
    for term in _terms.values():
        if term.variant is type(variant):
            return term
    raise PolicyError(f"{type(variant).__name__} is not registered; decorate it with @register(axis, name)")


def nested(variant: Any) -> Iterator[Term]:
    """An instance and the terms among its arguments: `chunk(snapkv)` is two."""
    yield variant
    for field in dataclasses.fields(variant):
        value = getattr(variant, field.name)
        if isinstance(value, Term):
            yield from nested(value)


_SHOWN_DIGITS = 16


def check_file_name(term: str, file: str) -> None:
    if '"' in file or "\n" in file:
        raise PolicyError(f"{term}: file cannot hold quotation marks or line breaks; rename the file")


def stated_content(term: str, file: str, stated: str, digest: str) -> str:
    """How an expression states the content of this digest; refused if it states another."""
    found = f"sha_{digest[:_SHOWN_DIGITS]}"
    if stated not in ("", found):
        raise PolicyError(f'{term}(file="{file}"): its content is {found}, not {stated}; measure it anew')
    return found


NAMES = {
    "score": "full", "budget": "uniform", "protect": "protect", "evicted": "drop", "position": "keep",
    "codec": "native", "attend": "all", "prefill": "dense",
}  # fmt: skip
PHASES = ("prefill", "decode")
_MODULES = {
    "when": "triggers",
    "prefill": "token_pruning",
    "shorten": "shortening",
}  # of axes whose module has another name


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
