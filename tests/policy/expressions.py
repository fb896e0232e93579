"""Hypothesis strategies: policies made of every registered term, with arguments drawn from their annotations."""

from __future__ import annotations

import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import reject
from hypothesis import strategies as st

from kvfold.errors import PolicyError
from kvfold.policy import Policy
from kvfold.policy.bind import axis_of, bind
from kvfold.policy.parse import Call, parse
from kvfold.policy.registry import Registration, load_variants, terms
from kvfold.policy.size import Percent
from kvfold.policy.text import literal

load_variants()
_PHASES = ("prefill", "decode")
_STAGE_AXES = ("budget", "protect", "evicted")
FILES = ("alpha", "beta")  # all strings that terms take are names of files
_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB", "KiB", "MiB", "GiB", "TiB")
_slices = st.builds("{}:{}".format, st.integers(-3, 3) | st.just(""), st.integers(-3, 9) | st.just(""))


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    """Policies that the language accepts."""
    try:
        return Policy.parse(draw(expressions()))
    except PolicyError:
        reject()


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Expressions of well-formed terms; some combine what cannot work together."""
    shape = draw(st.sampled_from(["nothing", "both", "apart", *_PHASES]))
    written: list[str] = []
    if shape == "both":
        written += draw(_stage(_PHASES))
    for phase in _PHASES:
        if shape in (phase, "apart"):
            written.append(f"{phase}({' + '.join(draw(_stage((phase,))))})")
    written += [draw(_term(axis)) for axis in ("position", "attend") if draw(st.booleans())]
    written += [draw(_codec())] if draw(st.booleans()) else []
    return " + ".join(draw(st.permutations(written))) or "full"


@st.composite
def _stage(draw: st.DrawFn, phases: tuple[str, ...]) -> list[str]:
    written = [draw(_term("score").filter(lambda text: text != "full")), draw(_sizes())]
    written += [draw(_term(axis)) for axis in _STAGE_AXES if draw(st.booleans())]
    return written + [draw(_term("when", phase)) for phase in phases if draw(st.booleans())]


def _term(axis: str, phase: str | None = None) -> st.SearchStrategy[str]:
    fitting = [term for term in terms(axis) if phase is None or term.variant.phase == phase]
    return st.sampled_from(fitting).flatmap(_call)


@st.composite
def _codec(draw: st.DrawFn) -> str:
    (k, v), layers = draw(st.tuples(_term("codec"), _term("codec"))), draw(_slices)
    whole = k.replace(")", f", layers={layers})") if k.endswith(")") else f"{k}(layers={layers})"
    return draw(st.sampled_from([k, whole, f"codec(k={k}, v={v})", f"codec(v={v}, layers={layers})"]))


def _call(term: Registration) -> st.SearchStrategy[str]:
    hints = get_type_hints(term.variant)
    arguments = {field.name: _values(hints[field.name]) for field in term.arguments}
    return st.fixed_dictionaries({}, optional=arguments).map(lambda given: _text(term, given)).filter(_is_accepted)


def _text(term: Registration, given: dict[str, Any]) -> str:
    inside = ", ".join(f"{name}={literal(value)}" for name, value in given.items())
    return f"{term.name}({inside})" if inside else term.name


def _values(hint: Any) -> st.SearchStrategy[Any]:
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of([_values(option) for option in get_args(hint)])
    axis = axis_of(hint)
    if axis is not None:
        return st.sampled_from([term for term in terms(axis) if not _takes_terms(term)]).flatmap(_call)
    known: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(0, 300),
        float: st.floats(0, 1) | st.floats(1, 100),
        bool: st.booleans(),
        str: st.sampled_from(FILES),
        types.NoneType: st.none(),
        Percent: st.floats(0, 100, exclude_min=True).map(Percent),
    }
    return known[hint]


def _takes_terms(term: Registration) -> bool:
    hints = get_type_hints(term.variant)
    return any(axis_of(hints[field.name]) for field in term.arguments)


def _sizes() -> st.SearchStrategy[str]:
    ratios = st.floats(1, 1e17).map(lambda times: f"{times!r}x")
    tokens = st.integers(1, 10**17).map(lambda count: f"{count}tok")
    shares = st.floats(0, 100, exclude_min=True).map(lambda percent: f"{percent!r}%mem")
    in_bytes = st.builds("{}{}".format, st.integers(1, 10**5), st.sampled_from(_BYTE_UNITS))
    several = st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), ratios | tokens, shares | in_bytes)
    return ratios | tokens | shares | in_bytes | several


def _is_accepted(text: str) -> bool:
    (call,) = parse(text)
    assert isinstance(call, Call)
    try:
        bind(call)
    except PolicyError:
        return False
    return True
