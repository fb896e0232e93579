"""From terms to the parts of a policy: which phase a term is for, which one wins, and what the defaults are.

A term outside a phase applies to both; inside `prefill(...)` or `decode(...)` it wins over the outer one. A trigger
belongs to a phase by its kind, so `between_chunks + every(64)` needs no phases.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvfold.errors import PolicyError
from kvfold.policy.bind import bind
from kvfold.policy.codecs import CodecPlan
from kvfold.policy.defaults import PHASES, default, default_trigger
from kvfold.policy.parse import Call, Phase
from kvfold.policy.parts import PolicyParts
from kvfold.policy.size import Ratio, Size
from kvfold.policy.stage import STAGE_AXES, Stage
from kvfold.policy.text import listing, noun, nouns

_Level = dict[str, Any]  # axis (for triggers: phase; for the axis named like a phase: "token_pruning") -> value


def resolve(terms: Iterable[Call | Size | Phase]) -> PolicyParts:
    """The parts of a policy, defaults filled in; `check` tells whether they work together."""
    terms = tuple(terms)
    phases = [term for term in terms if isinstance(term, Phase)]
    outer = _level(term for term in terms if not isinstance(term, Phase))
    inner = {name: _inner(name, [phase for phase in phases if phase.name == name]) for name in PHASES}
    native = default("codec")
    return PolicyParts(
        prefill=_stage("prefill", outer | inner["prefill"]),
        decode=_stage("decode", outer | inner["decode"]),
        codec=outer.get("codec", CodecPlan(native, native)),
        position=outer.get("position", default("position")),
        attend=outer.get("attend", default("attend")),
        token_pruning=outer.get("token_pruning", default("prefill")),
    )


def _inner(name: str, phases: list[Phase]) -> _Level:
    if len(phases) > 1:
        raise PolicyError(f"{name}(...) stands twice; join the terms inside one {name}(...) with +")
    return _level(phases[0].terms, name) if phases else {}


def _level(terms: Iterable[Call | Size], phase: str | None = None) -> _Level:
    """The terms of one level, at most one per axis."""
    level: _Level = {}
    texts: dict[str, str] = {}
    for term in terms:
        axis, value = _bound(term)
        key = value.phase if axis == "when" else "token_pruning" if axis == "prefill" else axis
        if phase is not None:
            _refuse_in_phase(phase, axis, key, str(term))
        if key in level:
            raise _two_terms(axis, texts[key], str(term))
        level[key], texts[key] = value, str(term)
    return level


def _bound(term: Call | Size) -> tuple[str, Any]:
    return ("size", term) if isinstance(term, Size) else bind(term)


def _refuse_in_phase(phase: str, axis: str, key: str, text: str) -> None:
    if axis not in STAGE_AXES:
        raise PolicyError(
            f"{noun(axis)} {text} cannot stand inside {phase}(...), it holds for both phases; "
            f"write it outside (a phase takes {', '.join(STAGE_AXES)})"
        )
    if axis == "when" and key != phase:
        raise PolicyError(f"trigger {text} belongs to {key}, not to {phase}; write it outside or in {key}(...)")


def _two_terms(axis: str, first: str, second: str) -> PolicyError:
    if axis == "codec":
        way = "codec(k=..., v=...) sets keys and values apart"
    elif axis == "size":
        way = f"min({first}, {second}) or max({first}, {second}) joins them"
    elif axis == "when":
        way = "each phase has one trigger"
    elif axis in STAGE_AXES:
        way = "prefill(...) + decode(...) sets the phases apart"
    else:
        way = f"a policy has one {noun(axis)}"
    return PolicyError(f"two {nouns(axis)}, {first} and {second}; keep one ({way})")


def _stage(phase: str, chosen: _Level) -> Stage:
    budget = chosen.get("budget", default("budget"))
    unsaid = Ratio(1.0) if budget.may_leave and "score" in chosen else None
    size: Size | None = chosen.get("size", unsaid)
    if size is not None and "score" not in chosen:
        raise PolicyError(f"{phase} has size {size} but no score that says what to keep; {listing('score')}")
    score = chosen.get("score", default("score"))
    return Stage(
        score=score,
        budget=budget,
        size=size,
        when=chosen.get(phase, default_trigger(phase, score, size)),
        protect=chosen.get("protect", default("protect")),
        evicted=chosen.get("evicted", default("evicted")),
    )
