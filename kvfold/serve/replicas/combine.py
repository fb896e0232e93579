"""One answer from those of all replicas: counters are added, histories aligned, percentiles taken of all samples."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from kvfold.serve.api.strict_json import Json
from kvfold.serve.ops.recent_requests import NUM_LISTED, percentiles

SAMPLES = {"first_token_ms": "first_token_samples_ms", "token_ms": "token_samples_ms"}  # percentiles: all samples
_LINE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*(?:\{.*\})?) (?P<value>\S+)")


class MetricsSum:
    """Prometheus text of all replicas. What a replica had counted when it was last asked stays in the sum after its
    death, so that counters never fall."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, dict[str, float]]] = {}  # replica -> its process, its counters
        self._ended: dict[str, float] = {}
        self._heads: dict[str, list[str]] = {}  # metric -> comments, then names of its lines in order

    def text(self, found: Mapping[int, tuple[int, str]], more: str = "") -> str:
        """`found`: replica -> its process and text. `more`: lines of the proxy."""
        sums: dict[str, float] = {}
        for number, (process, text) in found.items():
            values, kinds = _parsed(text, self._heads)
            counters = {name: value for name, value in values.items() if kinds[name] != "gauge"}
            before = self._last.get(number, (process, {}))
            if before[0] != process:
                _add(self._ended, before[1])
            self._last[number] = process, counters
            _add(sums, values)
        silent = [counters for number, (_, counters) in self._last.items() if number not in found]
        for ended in (self._ended, *silent):
            _add(sums, ended)
        lines = [line for lines in self._heads.values() for line in lines if line in sums or line.startswith("#")]
        return "\n".join([*(f"{line} {sums[line]:.17g}" if line in sums else line for line in lines), more])


def _parsed(text: str, heads: dict[str, list[str]]) -> tuple[dict[str, float], dict[str, str]]:
    """Values and types by line; `heads` gets the lines that it does not have yet, below the comments they follow."""
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    metric, kind = "", ""
    for line in text.splitlines():
        if line.startswith("#"):
            _, word, metric, about = line.split(" ", 3)
            kind = about if word == "TYPE" else ""
            name = line
        elif found := _LINE.fullmatch(line):
            name = found["name"]
            values[name], kinds[name] = float(found["value"]), kind
        else:
            continue
        if name not in heads.setdefault(metric, []):
            heads[metric].append(name)
    return values, kinds


def combined_state(states: Sequence[Json]) -> Json:
    """Of /dashboard/state, one each of all replicas."""
    first = states[0]
    arena = {name: sum(state["arena"][name] for state in states) for name in first["arena"]}
    rows = sorted((row for state in states for row in state["requests"]), key=lambda row: row["at"], reverse=True)
    return {
        **first,
        **{name: sum(state[name] for state in states) for name in ("running", "waiting")},
        "arena": arena,
        "tiers": _tiers([state["tiers"] for state in states]),
        "history": _history([state["history"] for state in states]),
        **combined_stats(states),
        "requests": rows[:NUM_LISTED],
    }


def combined_stats(states: Sequence[Json]) -> Json:
    """Totals of a tenant's requests; states have all samples of what they give percentiles of."""
    usd = [state["usd"] for state in states if state["usd"] is not None]
    return {
        **{name: sum(state[name] for state in states) for name in ("done", "refused")},
        **{name: _added([state[name] for state in states]) for name in ("tokens", "lookups")},
        "usd": _added(usd) if usd else None,
        **{name: percentiles(x for state in states for x in state[samples]) for name, samples in SAMPLES.items()},
    }


def without_samples(state: Json) -> Json:
    return {name: value for name, value in state.items() if name not in SAMPLES.values()}


def _added(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        _add(found, part)
    return found


def _add(total: dict[str, float], part: Mapping[str, float]) -> None:
    for name, value in part.items():
        total[name] = total.get(name, 0) + value


def _tiers(parts: Sequence[Sequence[Json]]) -> list[Json]:
    found: dict[str, Json] = {}
    for tier in (tier for part in parts for tier in part):
        known = found.setdefault(tier["name"], {"name": tier["name"], "bytes": None, "hits": 0})
        if tier["bytes"] is not None:
            known["bytes"] = (known["bytes"] or 0) + tier["bytes"]
        known["hits"] += tier["hits"]
    return list(found.values())


def _history(parts: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Samples at the times of the longest history; to each, the others' latest samples before it are added."""
    longest = max(parts, key=len)
    found = [list(sample) for sample in longest]
    for part in (part for part in parts if part is not longest):
        times = [sample[0] for sample in part]
        for sample in found:
            at = bisect_right(times, sample[0]) - 1
            if sample is found[-1]:
                at = len(part) - 1  # the present, which each replica tells by its own clock
            if at >= 0:
                sample[1:] = [a + b for a, b in zip(sample[1:], part[at][1:], strict=True)]
    return found


def combined_health(found: Mapping[int, Json], are_up: Sequence[bool], is_known: bool = True) -> tuple[Json, int]:
    """`found`: replica -> its /health, of those that answered in time; `are_up`: by the last health checks. Load and
    model are shown to clients whose API key is known."""
    are_ok = [is_up and found.get(number, {"status": "ok"})["status"] == "ok" for number, is_up in enumerate(are_up)]
    status = "ok" if all(are_ok) else "degraded" if any(are_ok) else "failed"
    health: Json = {"status": status}
    known = [health for health in found.values() if "model" in health]
    if known:
        health |= {name: known[0][name] for name in ("model", "policy", "version")}
        health |= {name: sum(one[name] for one in known) for name in ("running", "waiting")}
    if is_known:
        silent = [{"status": "silent" if is_up else "down"} for is_up in are_up]
        health["replicas"] = [found.get(number, state) for number, state in enumerate(silent)]
    return health, 200 if any(are_ok) else 503
