"""The named suites: default workloads, policies, budgets and lengths of `kvfold bench`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvfold.bench.methods import methods
from kvfold.bench.record import MODES, OWN, Mode
from kvfold.errors import InputError


@dataclass(frozen=True)
class Suite:
    name: str
    summary: str
    workloads: tuple[str, ...]
    policies: Callable[[], tuple[str, ...]]  # called late: it reads the registry
    memories: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int  # of each task
    fidelity: int = 0  # samples of each task
    diagnostics: int = 0
    modes: tuple[Mode, ...] = MODES


def _tight() -> tuple[str, ...]:
    kvzip, surprised, open_end = "kvzip + global", "kvzip(surprise=2) + global", "protect(recent=0)"
    return (
        kvzip,
        f"{kvzip} + fit",
        f"{kvzip} + {open_end} + fit",
        f"{surprised} + {open_end}",
        f"{surprised} + {open_end} + fit",
        "learned + global",
        "keydiff",
        "keydiff + int4",
        f"{kvzip} + int4",
        f"{kvzip} + int4 + fit",
        f"{kvzip} + int4 + fit(study)",
        f"{surprised} + {open_end} + int4 + fit",
        f"{kvzip} + int2",
        f"{kvzip} + int2 + fit",
        "learned + global + int4",
        "learned + global + int4 + fit",
    )


def _curve() -> tuple[str, ...]:
    kvzip = "kvzip + global"
    return (
        "streaming",
        "snapkv",
        "snapkv + ada",
        "snapkv + ada + int4",
        "keydiff",
        "keydiff + int4",
        kvzip,
        f"{kvzip} + int4",
        "learned + global + int4",
    )


QUICK = Suite(
    name="quick",
    summary="what a 135M model can do at all, in minutes on a CPU",
    workloads=("needle:needles_1", "ruler:niah_multikey_1", "chat:turns"),
    policies=lambda: ("streaming", "snapkv + ada", "keydiff", "int4", "keydiff + int4"),
    memories=("100%", "50%", "25%"),
    lengths=(768,),
    samples=2,
    fidelity=1,
    diagnostics=1,
)
STANDARD = Suite(
    name="standard",
    summary="retrieval, tracing, lookup, conversation and questions over documents",
    workloads=(
        "needle:needles_1",
        "needle:needles_3",
        "ruler:niah_single_2",
        "ruler:niah_multikey_1",
        "ruler:niah_multivalue",
        "ruler:vt",
        "lines",
        "kv",
        "passkey",
        "chat:requests",
        "rag:planted",
    ),
    policies=lambda: (
        "streaming",
        "snapkv + ada",
        "keydiff",
        "expected + ada",
        "kvzip + global",
        "learned + global",
        "int4",
        "int2",
        "kivi2",
        "keydiff + int4",
        "learned + global + int4",
        "kvzip + global + int4",
        "kvzip + global + int2",
    ),
    memories=("100%", "50%", "25%", "12.5%", "6.25%"),
    lengths=(4096,),
    samples=100,
    fidelity=8,
    diagnostics=1,
)
_NEEDLES = ("ruler:niah_single_2", "ruler:niah_multikey_1", "ruler:niah_multivalue")
METHODS = Suite(
    name="methods",
    summary="every method there is, on needles",
    workloads=_NEEDLES,
    policies=methods,
    memories=("100%", "50%", "25%", "12.5%", "6.25%", OWN),
    lengths=(4096,),
    samples=8,
)
TIGHT = Suite(
    name="tight",
    summary="what keeps most needles in few bytes when no question is known",
    workloads=_NEEDLES,
    policies=_tight,
    memories=("12.5%", "6.25%"),
    lengths=(2000,),
    samples=33,
    modes=("unknown",),
)
CURVE = Suite(
    name="curve",
    summary="how few bytes can be when the question is known, halving by halving",
    workloads=_NEEDLES,
    policies=_curve,
    memories=("50%", "25%", "12.5%", "6.25%", "3.125%", "1.5625%"),
    lengths=(8192,),
    samples=14,
    modes=("known",),
)
SUITES = {suite.name: suite for suite in (QUICK, STANDARD, METHODS, TIGHT, CURVE)}


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        raise InputError(f'no suite "{name}"; suites: {", ".join(SUITES)}')
    return SUITES[name]
