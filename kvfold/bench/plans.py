"""Which policies a run of needles compares, at which sizes: `benchmarks/needle.py --plan NAME`.

A policy that is complete, such as `int4`, stands as it is; the others get every size.
Terms that need a file trained or measured for the model (`learned`, `profile`, `palu`, `aqua`) are added on the
command line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfold.bench.methods import scores
from kvfold.bench.rows import MODES, OWN_POLICIES, Mode
from kvfold.errors import InputError

_BYTES = ("12.5%mem", "6.25%mem")


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


def _scorers() -> Sequence[str]:
    return (*scores(), "snapkv + ada", "keydiff + ada", "expected + ada", "int4", "keydiff + int4",
            "snapkv + ada + int4", "keydiff + ada + int4")  # fmt: skip


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
        *(f"{kvzip} + {codec} + {size}" for size in _BYTES for codec in ("int4", "int4 + fit", "int2")),
    )


PLANS = {
    OWN_POLICIES: Plan(_scorers, ("2x", "4x", "8x"), MODES, tokens=1000, samples=100),
    "few": Plan(_few, ("8x", "16x"), ("unknown",), tokens=4096, samples=98),
}
