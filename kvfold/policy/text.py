"""A policy as text: canonical with every default written out, or short as one would type it.

Choices on which the phases agree stand outside; where they differ each stands in its phase. Triggers belong to a
phase by their kind and always stand outside.
"""

from __future__ import annotations

import dataclasses
import re
from difflib import get_close_matches
from typing import Any

from kvfold.errors import PolicyError
from kvfold.policy.parts import STAGE_AXES, CodecPlan, PolicyParts, Stage, default_trigger
from kvfold.policy.registry import AXES, Registration, Term, default, term_of, terms
from kvfold.policy.size import Percent, Size, number_text


def canonical(policy: PolicyParts) -> str:
    return " + ".join(_shorten(policy, True) + _phases(policy, True) + _common(policy, True))


def short(policy: PolicyParts) -> str:
    cache = _phases(policy, False) + _common(policy, False) or [term_text(policy.prefill.score, False)]
    return " + ".join(_shorten(policy, False) + cache)


def _shorten(policy: PolicyParts, defaults: bool) -> list[str]:
    """What happens to the text comes first; policies that leave it alone do not say so."""
    return [] if policy.shorten is None else [term_text(policy.shorten, defaults)]


def plan_text(plan: CodecPlan, defaults: bool) -> str:
    layers = [] if plan.layers.is_all else [f"layers={plan.layers}"]
    if plan.k == plan.v:
        return call_text(term_of(plan.k).name, given_arguments(plan.k, defaults) + layers)
    sides = [("k", plan.k), ("v", plan.v)]
    written = [f"{side}={term_text(codec, defaults)}" for side, codec in sides if defaults or codec != default("codec")]
    return call_text("codec", written + layers)


def _phases(policy: PolicyParts, defaults: bool) -> list[str]:
    """`prefill(...)` and `decode(...)` with what they do not share."""
    texts = []
    for phase, stage in policy.stages():
        apart = [axis for axis in STAGE_AXES if axis != "when" and not _is_shared(policy, axis)]
        inside = [text for axis in apart if (text := _choice(stage, axis, defaults))]
        if inside:
            texts.append(f"{phase}({' + '.join(inside)})")
    return texts


def _common(policy: PolicyParts, defaults: bool) -> list[str]:
    texts = []
    for axis in STAGE_AXES:
        if axis == "when":
            texts += [_trigger(phase, stage, defaults) for phase, stage in policy.stages()]
        elif _is_shared(policy, axis):
            texts.append(_choice(policy.prefill, axis, defaults))
    texts.append(_unless_default(policy.position, "position", defaults))
    is_native = policy.codec.k == policy.codec.v == default("codec")
    texts.append("" if is_native and not defaults else plan_text(policy.codec, defaults))
    texts.append(_unless_default(policy.attend, "attend", defaults))
    texts.append(_unless_default(policy.token_pruning, "prefill", defaults))
    return [text for text in texts if text]


def _is_shared(policy: PolicyParts, axis: str) -> bool:
    return bool(getattr(policy.prefill, axis) == getattr(policy.decode, axis))


def _choice(stage: Stage, axis: str, defaults: bool) -> str:
    value = getattr(stage, axis)
    if isinstance(value, Size):
        return str(value)
    return "" if value is None else _unless_default(value, axis, defaults)


def _trigger(phase: str, stage: Stage, defaults: bool) -> str:
    is_default = stage.when == default_trigger(phase, stage.score, stage.size)
    return "" if is_default and not defaults else term_text(stage.when, defaults)


def _unless_default(variant: Any, axis: str, defaults: bool) -> str:
    return "" if variant == default(axis) and not defaults else term_text(variant, defaults)


_WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def literal(value: Any, defaults: bool = False) -> str:
    """An argument's value in the words of the language; a term in its short form or, with `defaults`, its full one."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if dataclasses.is_dataclass(value) and not isinstance(value, Size):
        return term_text(value, defaults)
    if isinstance(value, int | float):
        return number_text(value)
    if isinstance(value, Percent | Size):
        return str(value)
    return value if _WORD.fullmatch(value) else f'"{value}"'


def term_text(variant: Any, defaults: bool) -> str:
    """`snapkv(window=32)`; with `defaults` all arguments, else those that differ."""
    return call_text(term_of(variant).name, given_arguments(variant, defaults))


def given_arguments(variant: Any, defaults: bool) -> list[str]:
    """`size=20`; terms and sizes need no keyword where one would leave it out: `shorten(graph, 4x)`."""
    fields = [field for field in term_of(variant).arguments if field.init]
    values = [(field, getattr(variant, field.name)) for field in fields]
    if not defaults and term_of(variant).name == "protect" and not any(value for _, value in values):
        return ["none"]
    written, is_in_place = [], not defaults
    for field, value in values:
        if not defaults and value == field.default:
            is_in_place = False
            continue
        is_in_place = is_in_place and isinstance(value, Term | Size | Percent)
        text = literal(value, defaults)
        written.append(text if is_in_place else f"{field.name}={text}")
    return written


def call_text(name: str, arguments: list[str]) -> str:
    return f"{name}({', '.join(arguments)})" if arguments else name


_NOUNS = {  # of axes that are not called as they are written
    "when": "trigger", "protect": "protection", "evicted": "treatment of evicted slots", "attend": "reader",
    "prefill": "way to prefill", "shorten": "way to shorten", "units": "units of a text",
}  # fmt: skip


def noun(axis: str) -> str:
    return _NOUNS.get(axis, axis)


def nouns(axis: str) -> str:
    first, *rest = noun(axis).split()
    return " ".join((first if first.endswith("s") else f"{first}s", *rest))


def listing(axis: str) -> str:
    """`codecs: bf16, fp8, ...`"""
    return f"{nouns(axis)}: {', '.join(term.name for term in terms(axis))}"


def unknown_name(name: str, axis: str | None = None) -> PolicyError:
    """The nearest names, then those of the axis if it is known or can be guessed, else all, grouped."""
    near = _nearest(name, terms(axis))
    if axis is None and near:
        axis = near[0].axis
    names = [term.name for term in near]
    either = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    hint = f"did you mean {either}? " if near else ""
    known = listing(axis) if axis else "; ".join(listing(each) for each in AXES if terms(each))
    return PolicyError(f'no {noun(axis) if axis else "term"} "{name}"; {hint}{known}')


def _nearest(name: str, among: tuple[Registration, ...]) -> list[Registration]:
    by_name = {term.name: term for term in among}
    return [by_name[close] for close in get_close_matches(name.lower(), by_name, n=3, cutoff=0.6)]
