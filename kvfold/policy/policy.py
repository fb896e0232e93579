"""A policy: what is kept, where, when and how it is stored, as one frozen value that an expression denotes.

Every published method of KV-cache compression is a point in the product of independent choices; `Policy.parse` reads
one, `str` writes it with all defaults, `short` without, and `fingerprint` names the results it gives.

A term outside a phase applies to both; inside `prefill(...)` or `decode(...)` it wins over the outer one. A trigger
belongs to a phase by its kind, so `between_chunks + every(64)` needs no phases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvfold.errors import PolicyError
from kvfold.policy.bind import bind
from kvfold.policy.check import check
from kvfold.policy.parse import Call, Phase, parse
from kvfold.policy.parts import STAGE_AXES, CodecPlan, PolicyParts, Stage, default_trigger
from kvfold.policy.registry import PHASES, default, load_variants, term_of
from kvfold.policy.size import Ratio, Size
from kvfold.policy.text import canonical, listing, noun, nouns, short, term_text

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
        shorten=outer.get("shorten"),
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
        bound: tuple[str, Any] = ("size", term) if isinstance(term, Size) else bind(term)
        axis, value = bound
        key = value.phase if axis == "when" else "token_pruning" if axis == "prefill" else axis
        if phase is not None:
            _refuse_in_phase(phase, axis, key, str(term))
        if key in level:
            raise _two_terms(axis, texts[key], str(term))
        level[key], texts[key] = value, str(term)
    return level


def _refuse_in_phase(phase: str, axis: str, key: str, text: str) -> None:
    if axis not in STAGE_AXES:
        raise PolicyError(
            f"{noun(axis)} {text} cannot stand inside {phase}(...), it holds for both phases; "
            f"write it outside (a phase takes {', '.join(STAGE_AXES)})"
        )
    if axis == "when" and key != phase:
        raise PolicyError(f"trigger {text} belongs to {key}, not to {phase}; write it outside or in {key}(...)")


def _two_terms(axis: str, first: str, second: str) -> PolicyError:
    apart = "prefill(...) + decode(...) sets the phases apart"
    ways = {
        "codec": "codec(k=..., v=...) sets keys and values apart",
        "size": f"min({first}, {second}) or max({first}, {second}) joins them",
        "when": "each phase has one trigger",
    }
    way = ways.get(axis, apart if axis in STAGE_AXES else f"a policy has one {noun(axis)}")
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


@dataclass(frozen=True)
class Policy(PolicyParts):
    """Parts that work together: a combination that cannot is refused when it is made."""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def parse(cls, source: str | Policy) -> Policy:
        """Read an expression such as `snapkv(window=32) + ada + 8x + int4`; a Policy is returned as it is."""
        if isinstance(source, Policy):
            return source
        if not isinstance(source, str):
            raise PolicyError(f'a policy is text such as "snapkv + ada + 8x + int4", not {type(source).__name__}')
        load_variants()
        try:
            return cls(**vars(resolve(parse(source))))
        except PolicyError as error:
            raise type(error)(f'policy "{_one_line(source)}": {error}') from None

    def __str__(self) -> str:
        """The canonical form: all defaults written out, in the order of the axes."""
        return canonical(self)

    @property
    def short(self) -> str:
        """What one would type: defaults are left out."""
        return short(self)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the canonical form and the revision of every term; the first 16 digits are enough to show."""
        revisions = sorted(f"{term.name}@{term.revision}" for term in map(term_of, self.variants))
        return hashlib.sha256("\n".join((self._identity, *revisions)).encode()).hexdigest()

    @property
    def _identity(self) -> str:
        """The canonical form, in which variants that read a file stand for what is in it, not for where it lies."""
        text = str(self)
        for variant in self.variants:
            if variant.identity is not None:
                written, said = term_text(variant, True), variant.identity
                text = text.replace(written.removesuffix(")"), said.removesuffix(")"))  # a codec's layers may follow
        return text


def _one_line(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
