"""From the nodes of an expression to variants: names are looked up, arguments matched to fields and their types.

The fields of a variant's dataclass are its arguments; their annotations (int, float, bool, str, Percent, Literal,
X | None) are the types that an expression may give. A field annotated with the base class of an axis takes a term of
that axis: `chunk(snapkv(window=16), size=10)`.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kvfold.errors import PolicyError
from kvfold.policy.parse import Argument, Call, Value
from kvfold.policy.parts import CodecPlan, LayerSlice
from kvfold.policy.registry import NAMES, Registration, default, find, terms
from kvfold.policy.size import Percent, Size
from kvfold.policy.text import listing, literal, noun, unknown_name

ARGUMENT_AXES = {"selector": "{}, 4x", "units": "graph, 4x, units={}"}  # their terms stand inside shorten(...) alone
_MISMATCH = object()
_WORDS = {"true": True, "false": False}


def bind(call: Call) -> tuple[str, Any]:
    """The axis and the value of a term; for codecs a CodecPlan."""
    if call.name == "codec":
        return "codec", _codec_sides(call)
    term = find(call.name)
    if term is None:
        raise unknown_name(call.name)
    if term.axis == "codec":
        return "codec", _codec(call)
    if term.axis in ARGUMENT_AXES:
        raise PolicyError(f"{call} says how text is shortened; write shorten({ARGUMENT_AXES[term.axis].format(call)})")
    return term.axis, _variant(term, call.arguments)


def _codec(call: Call) -> CodecPlan:
    """`int4(group=32, layers=2:-2)`: every codec takes `layers`."""
    rest = tuple(argument for argument in call.arguments if argument.keyword != "layers")
    codec = _inner("codec", Call(call.name, rest))
    return CodecPlan(codec, codec, _layers(call))


def _codec_sides(call: Call) -> CodecPlan:
    """`codec(k=int8, v=int4, layers=2:-2)`; a side that is left out stays native."""
    sides = {argument.keyword: argument.value for argument in call.arguments if argument.keyword in ("k", "v")}
    if not sides or any(argument.keyword not in ("k", "v", "layers") for argument in call.arguments):
        raise PolicyError(f"{call}: codec takes k=, v= and layers=, such as codec(k=int8, v=int4, layers=2:-2)")
    _refuse_repeats(call)
    k, v = (_inner("codec", sides[side]) if side in sides else default("codec") for side in ("k", "v"))
    return CodecPlan(k, v, _layers(call))


def _layers(call: Call) -> LayerSlice:
    _refuse_repeats(call)
    for argument in call.arguments:
        if argument.keyword == "layers":
            if not isinstance(argument.value, LayerSlice):
                raise PolicyError(f"{call.name}({argument}): layers takes a slice, such as 2:-2")
            return argument.value
    return LayerSlice()


def _refuse_repeats(call: Call) -> None:
    keywords = [argument.keyword for argument in call.arguments if argument.keyword is not None]
    for keyword in keywords:
        if keywords.count(keyword) > 1:
            raise PolicyError(f"{call.name}: argument {keyword} is given twice")


def _variant(term: Registration, arguments: tuple[Argument, ...]) -> Any:
    if term.name == "protect" and arguments == (Argument(None, Call("none")),):
        return term.variant(**{field.name: 0 for field in term.arguments})
    fields = {field.name: field for field in term.arguments if field.init}
    hints = _hints(term)
    given: dict[str, Any] = {}
    for place, argument in enumerate(arguments):
        name = argument.keyword or (list(fields)[place] if place < len(fields) else None)
        if name not in fields:
            raise PolicyError(f"{term.name} has no argument {argument}; {_signature(term)}")
        if name in given:
            raise PolicyError(f"{term.name}: argument {name} is given twice")
        given[name] = _checked(term, name, argument.value, hints[name])
    if missing := missing_arguments(term, given):
        raise PolicyError(f"{term.name} needs argument {missing[0]}; {_signature(term)}")
    return term.variant(**given)


@cache
def _hints(term: Registration) -> dict[str, Any]:
    return get_type_hints(term.variant)


def missing_arguments(term: Registration, given: Collection[str]) -> list[str]:
    """Arguments that have no default and were not given."""
    fields = [field for field in term.arguments if field.init and field.name not in given]
    return [field.name for field in fields if _default_of(field) is dataclasses.MISSING]


def _checked(term: Registration, name: str, value: Value, hint: Any) -> Any:
    axis = axis_of(hint)
    if axis is not None:
        return _inner(axis, value)
    found = _coerce(value, hint)
    if found is _MISMATCH and isinstance(value, float) and value.is_integer():
        raise PolicyError(f"{term.name}: {name} takes {_type_text(hint)}, in digits alone; write {int(value)}")
    if found is _MISMATCH:
        raise PolicyError(f"{term.name}: {name} takes {_type_text(hint)}, not {_text(value)}")
    return found


def axis_of(hint: Any) -> str | None:
    """The axis whose terms an annotation takes: that of a base class, such as Scorer."""
    if not isinstance(hint, type) or hint is object:
        return None
    return next((term.axis for term in terms() if issubclass(term.variant, hint)), None)


def _inner(axis: str, value: Value) -> Any:
    """A term in the place of an argument."""
    if not isinstance(value, Call):
        raise PolicyError(f"{_text(value)} is no {noun(axis)}; {listing(axis)}")
    term = find(value.name)
    if term is None or term.axis != axis:
        raise unknown_name(value.name, axis)
    return _variant(term, value.arguments)


def _coerce(value: Value, hint: Any) -> Any:
    """The value as the annotation wants it, or _MISMATCH."""
    if get_origin(hint) in (Union, types.UnionType):
        found = (_coerce(value, option) for option in get_args(hint))
        return next((each for each in found if each is not _MISMATCH), _MISMATCH)
    if isinstance(value, Call) and not value.arguments:
        return _coerce_word(value.name, hint)
    if isinstance(value, int | float):
        return _coerce_number(value, hint)
    if isinstance(value, Percent | Size):
        return value if isinstance(hint, type) and isinstance(value, hint) else _MISMATCH
    return value if hint is str and isinstance(value, str) else _MISMATCH


def _coerce_word(word: str, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return word if word in get_args(hint) else _MISMATCH
    if hint is types.NoneType:
        return None if word == "none" else _MISMATCH
    if hint is bool:
        return _WORDS.get(word, _MISMATCH)
    return word if hint is str else _MISMATCH


def _coerce_number(number: int | float, hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return next((option for option in get_args(hint) if option == number and type(option) is int), _MISMATCH)
    if hint is float:
        return float(number)
    return number if hint is int and isinstance(number, int) else _MISMATCH


def arguments_text(term: Registration) -> str:
    """`window=32, kernel=5`, as an expression would write them; codecs but the default one take `layers` as well."""
    values = {field.name: _default_of(field) for field in term.arguments if field.init}
    written = [name if value is dataclasses.MISSING else f"{name}={literal(value)}" for name, value in values.items()]
    takes_layers = term.axis == "codec" and term.name != NAMES["codec"]
    return ", ".join([*written, "layers=:"] if takes_layers else written)


def _signature(term: Registration) -> str:
    text = arguments_text(term)
    return f"arguments of {term.name}: {text}" if text else f"{noun(term.axis)} {term.name} takes no arguments"


def _default_of(field: dataclasses.Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _text(value: Value) -> str:
    return str(Argument(None, value))


def _type_text(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(literal(option) for option in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_type_text(option) for option in get_args(hint))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    return (words | {Percent: "a share like 50%", Size: "a size like 4x"}).get(hint, "none")
