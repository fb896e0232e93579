"""Which policies a run of needles compares, at which sizes: `benchmarks/needle.py --plan NAME`.

A policy that is complete, such as `int4` or `streaming + 8x + recall`, stands as it is; the others get every size.
Terms that need a file trained or measured for the model (`learned`, `profile`, `palu`, `aqua`) are added on the
command line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kvfold.bench.rows import MODES, OWN_POLICIES, Mode
from kvfold.errors import InputError
from kvfold.policy.defaults import NAMES, load_variants
from kvfold.policy.registry import Term, terms

_HALVES = ("50%mem", "25%mem", "12.5%mem", "6.25%mem")


@dataclass(frozen=True)
class Plan:
    policies: Callable[[], Sequence[str]]  # the registry is read when somebody asks
    sizes: tuple[str, ...]
    modes: tuple[Mode, ...]
    tokens: int  # of a prompt
    samples: int  # prompts, taking turns over tasks


def find_plan(name: str) -> Plan:
    if name not in PLANS:
        raise InputError(f'no plan "{name}"; plans: {", ".join(PLANS)}')
    return PLANS[name]


@cache
def scorers() -> tuple[str, ...]:
    """Every registered scorer that evicts and needs neither an argument nor training for the model."""
    return tuple(term.name for term in _complete("score") if term.variant().needs.predictor is None)


def _complete(axis: str) -> list[Term]:
    """The terms of an axis that stand without arguments, but for its default."""
    load_variants()
    found = [term for term in terms(axis) if term.name != NAMES.get(axis)]
    return [term for term in found if all(map(_is_optional, term.arguments))]


def _is_optional(argument: dataclasses.Field[Any]) -> bool:
    return argument.default is not dataclasses.MISSING or argument.default_factory is not dataclasses.MISSING


def _names(axis: str, *but: str) -> list[str]:
    return [term.name for term in _complete(axis) if term.name not in but]


def _scorers() -> Sequence[str]:
    return (*scorers(), "snapkv + ada", "keydiff + ada", "expected + ada", "int4", "keydiff + int4",
            "snapkv + ada + int4", "keydiff + ada + int4")  # fmt: skip


def _methods() -> Sequence[str]:
    """Each registered term once or more: budgets and treatments of what goes under scores that they serve, codecs and
    readers alone and under eviction."""
    return (
        *_scorers(),
        *(f"kvzip + {budget}" for budget in _names("budget")),
        "kvzip_plus + global",
        "defensive + global",
        "critical + ada",
        "kvcompress + pages",
        *(f"kvzip + global + {evicted}" for evicted in _names("evicted", "recall")),
        "h2o + cam",
        "h2o + d2o",
        "keydiff + fit",
        "streaming + 8x + recall(tokens=256)",
        "streaming + slot",
        *_names("codec", "int4", "minicache"),
        "minicache(layers=14::2)",  # a layer needs one below; the paper begins in the middle
        *(f"kvzip + global + {codec}" for codec in _names("codec", "minicache")),  # it refuses eviction
        *(f"{reader}(tokens=512)" for reader in _names("attend")),
        *(f"snapkv + {prefill}" for prefill in _names("prefill")),
    )


def _few() -> Sequence[str]:
    """What keeps most in few slots, or in their bytes, when no question is known yet."""
    kvzip, surprised, open_end = "kvzip + global", "kvzip(surprise=2) + global", "protect(recent=0)"
    return (
        "kvzip",
        kvzip,
        f"{kvzip} + fit",
        f"{kvzip} + {open_end}",
        f"{kvzip} + {open_end} + fit",
        surprised,
        f"{surprised} + {open_end}",
        f"{surprised} + {open_end} + fit",
        "kvzip_plus + global",
        f"kvzip_plus + global + {open_end} + fit",
        "keydiff",
        "keydiff + fit",
        *(f"{kvzip} + {codec} + {size}" for size in _HALVES[2:] for codec in ("int4", "int4 + fit", "int2")),
    )


def _curve() -> Sequence[str]:
    kvzip = "kvzip + global"
    return (
        "streaming",
        "snapkv",
        "snapkv + ada",
        "keydiff",
        "keydiff + int4",
        kvzip,
        f"{kvzip} + int4",
        f"{kvzip} + protect(recent=0) + fit",
    )


PLANS = {
    OWN_POLICIES: Plan(_scorers, ("2x", "4x", "8x"), MODES, tokens=1000, samples=100),
    "few": Plan(_few, ("8x", "16x"), ("unknown",), tokens=4096, samples=98),
    "curve": Plan(_curve, ("2x", "4x", "8x", "16x", "32x", "64x"), ("known",), tokens=8192, samples=42),
    "methods": Plan(_methods, _HALVES, MODES, tokens=4096, samples=24),
}
