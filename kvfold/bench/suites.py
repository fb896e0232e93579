"""The named suites (suites.toml): default workloads, policies, budgets and lengths of `kvfold bench`.

The suite `methods` has every registered term in at least one policy. Terms that need a file measured for the model and
named in the expression (`profile`, `palu`) are left to `--also`.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from kvfold.bench.record import MODES, Mode
from kvfold.errors import InputError
from kvfold.policy.registry import NAMES, Registration, load_variants, terms


@dataclass(frozen=True)
class Suite:
    name: str
    summary: str
    workloads: tuple[str, ...]
    memories: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int  # of each task
    fidelity: int = 0  # samples of each task
    diagnostics: int = 0
    modes: tuple[Mode, ...] = MODES
    listed: tuple[str, ...] = ()  # policies; none: every method there is

    def policies(self) -> tuple[str, ...]:
        return self.listed or methods()


# What a method protects, or how it shares its slots out, as its paper or its authors' code has it, where that is not
# the default. NACL protects a twentieth of what it keeps: from 25,600 tokens on 256 sinks, here the usual four.
_H2O = "h2o + protect(sinks=0, recent=50%)"
_FASTGEN = "fastgen + adaptive(loss=0.999, window=none) + protect(none)"  # its size is what the kinds come to
_PUBLISHED = {
    "h2o": _H2O,
    "scissorhands": "scissorhands + protect(sinks=0, recent=10)",
    "a2sf": "a2sf + protect(sinks=0, recent=16)",
    "nacl": "nacl + protect(recent=5%)",
    "lava_score": "lava_score + lava",
}
_ROCKET = "snapkv(window=32, kernel=63, pool=max, over_window=sum, over_group=sum)"


@cache
def methods() -> tuple[str, ...]:
    """Each term at least once, methods as published: budgets and compensation under the scores they fit, codecs alone
    and with eviction."""
    return (
        *scores(),
        "snapkv + ada",
        "keydiff + ada",
        "expected + ada",
        "keydiff + int4",
        "snapkv + ada + int4",
        "keydiff + ada + int4",
        *(f"kvzip + {budget}" for budget in _names("budget")),
        "kvzip_plus + global",
        "defensive + global",
        "learned + global",
        "critical + ada",
        "kvcompress + pages",
        "snapkv(window=8, kernel=7, pool=max) + pyramid",
        _FASTGEN,
        *(f"kvzip + global + {evicted}" for evicted in _names("evicted", "recall")),
        f"{_H2O} + d2o",
        "keydiff + fit",
        "streaming + recall(tokens=256)",
        "streaming + slot",
        *_names("codec", "minicache"),
        "minicache(layers=14::2)",  # a layer needs one below; the paper begins in the middle
        *(f"kvzip + global + {codec}" for codec in _names("codec", "minicache")),  # it refuses eviction
        *(f"{reader}(tokens=512)" for reader in _names("attend")),
        f"{_ROCKET} + 1.6x + rocket(tokens=512, reader=pages, ratio=2.6)",  # RocketKV, 1,024 of 4,096 tokens a step
        *(f"snapkv + {prefill}" for prefill in _names("prefill")),
    )


def scores() -> list[str]:
    """Every score that evicts, but for those trained for a model."""
    names = [term.name for term in _complete("score") if term.variant().needs.predictor is None]
    return [_PUBLISHED.get(name, name) for name in names]


def _names(axis: str, *but: str) -> list[str]:
    return [term.name for term in _complete(axis) if term.name not in but]


def _complete(axis: str) -> list[Registration]:
    """The terms of an axis that stand without arguments, but for its default."""
    load_variants()
    found = [term for term in terms(axis) if term.name != NAMES.get(axis)]
    return [term for term in found if all(map(_is_optional, term.arguments))]


def _is_optional(argument: dataclasses.Field[Any]) -> bool:
    return argument.default is not dataclasses.MISSING or argument.default_factory is not dataclasses.MISSING


def _suite(name: str, given: dict[str, Any]) -> Suite:
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Suite(name, **fields)


_GIVEN = tomllib.loads((files("kvfold.bench") / "suites.toml").read_text(encoding="utf-8"))
SUITES = {name: _suite(name, given) for name, given in _GIVEN.items()}


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        raise InputError(f'no suite "{name}"; suites: {", ".join(SUITES)}')
    return SUITES[name]
