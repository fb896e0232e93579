"""The named suites: what `kvfold bench` runs where it is not told otherwise."""

from __future__ import annotations

from dataclasses import dataclass

from kvfold.errors import InputError


@dataclass(frozen=True)
class Suite:
    name: str
    summary: str
    workloads: tuple[str, ...]
    policies: tuple[str, ...]
    memories: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int  # of each task
    fidelity: int  # samples of each task
    diagnostics: int


QUICK = Suite(
    name="quick",
    summary="what a 135M model can do at all, in minutes on a CPU",
    workloads=("needle:needles_1", "ruler:niah_multikey_1", "chat:turns"),
    policies=("streaming", "snapkv + ada", "keydiff", "int4", "keydiff + int4"),
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
    policies=("streaming", "snapkv + ada", "keydiff", "keydiff + ada", "expected + ada", "int4", "keydiff + int4"),
    memories=("100%", "50%", "25%", "12.5%"),
    lengths=(4096,),
    samples=100,
    fidelity=8,
    diagnostics=1,
)
SUITES = {suite.name: suite for suite in (QUICK, STANDARD)}


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        raise InputError(f'no suite "{name}"; suites: {", ".join(SUITES)}')
    return SUITES[name]
