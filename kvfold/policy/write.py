"""A policy as text: canonical with every default written out, or short as one would type it.

Choices on which the phases agree stand outside; where they differ each stands in its phase. Triggers belong to a
phase by their kind and always stand outside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfold.policy.codecs import CodecPlan
from kvfold.policy.defaults import default, default_trigger
from kvfold.policy.registry import term_of
from kvfold.policy.size import Size
from kvfold.policy.spell import call_text, given_arguments, term_text
from kvfold.policy.stage import STAGE_AXES, Stage

if TYPE_CHECKING:
    from kvfold.policy.policy import Policy


def canonical(policy: Policy) -> str:
    return " + ".join(_phases(policy, True) + _common(policy, True))


def short(policy: Policy) -> str:
    return " + ".join(_phases(policy, False) + _common(policy, False)) or term_text(policy.prefill.score, False)


def plan_text(plan: CodecPlan, defaults: bool) -> str:
    layers = [] if plan.layers.is_all else [f"layers={plan.layers}"]
    if plan.k == plan.v:
        return call_text(term_of(plan.k).name, given_arguments(plan.k, defaults) + layers)
    sides = [("k", plan.k), ("v", plan.v)]
    written = [f"{side}={term_text(codec, defaults)}" for side, codec in sides if defaults or codec != default("codec")]
    return call_text("codec", written + layers)


def _phases(policy: Policy, defaults: bool) -> list[str]:
    """`prefill(...)` and `decode(...)` with what they do not share."""
    texts = []
    for phase, stage in policy.stages():
        apart = [axis for axis in STAGE_AXES if axis != "when" and not _is_shared(policy, axis)]
        inside = [text for axis in apart if (text := _choice(stage, axis, defaults))]
        if inside:
            texts.append(f"{phase}({' + '.join(inside)})")
    return texts


def _common(policy: Policy, defaults: bool) -> list[str]:
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
    texts.append(_unless_default(policy.propagate, "prefill", defaults))
    return [text for text in texts if text]


def _is_shared(policy: Policy, axis: str) -> bool:
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
