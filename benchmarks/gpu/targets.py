"""What a GPU is to reach, as lines of a table: floor, what was reached, its ratio, peers of the same run, target, met.

Lines are made from saved rows; one whose rows are missing says so. Ratios are those of the rows: to bytes over
copy bandwidth (decode), to the base system (prefill).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.rows import Row, markdown_table

SHAPES = ((131072, 1), (32768, 16))
ATTENTION = {"bf16": 85, "int8": 80, "int4": 75, "int2": 60}  # codec: least percent of copy bandwidth
CAPTURED = {(131072, 1): 1.8, (32768, 16): 1.7}  # most times the floor
COMPILED, OWN_SHARE, HEADS = 1.35, 1.2, 1.1
INT4_SPEED, LOOKUP_SPEED = 2.5, 1.5
ADDED_PERCENT, PEAK_GB, SHORTENED_SPEED = 3.0, 23.0, 1.5
HELD, TOKENS_PER_S = 700, 12_000
POLICY = "snapkv + ada + 8x"
SHORTENED = ("snapkv + 8x", "snapkv + 8x + fastkv")
COLUMNS = ("", "floor", "reached", "ratio", "peers, same run", "target", "met")


@dataclass(frozen=True)
class Line:
    what: str
    target: str
    floor: str = ""
    reached: str = "not measured"
    ratio: str = ""
    peers: str = ""
    met: bool | None = None

    def cells(self) -> list[str]:
        met = {True: "yes", False: "no", None: "-"}[self.met]
        return [self.what, self.floor, self.reached, self.ratio, self.peers, self.target, met]


class Found:
    """Rows of a run, found by their values; of several that match, the last."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)

    def one(self, **values: object) -> Row | None:
        fitting = self.all(**values)
        return fitting[-1] if fitting else None

    def all(self, **values: object) -> list[Row]:
        return [row for row in self._rows if all(row.get(key) == value for key, value in values.items())]


def lines(rows: Iterable[Row]) -> list[Line]:
    found = Found(rows)
    parts = (attention_lines, step_lines, share_lines, prefill_lines, capacity_lines, lookup_lines)
    return [line for part in parts for line in part(found)]


def attention_lines(found: Found) -> Iterator[Line]:
    for context, batch in SHAPES:
        here: dict[str, Any] = {"question": "attention", "context": context, "batch": batch}
        dense, bf16 = found.one(**here, system="SDPA"), found.one(**here, system="kvfold", codec="bf16")
        peers = "" if dense is None else f"SDPA {dense['ms']:.3f} ms, {dense['bandwidth_percent']:.0f} %"
        for codec, percent in ATTENTION.items():
            row = found.one(**here, system="kvfold", codec=codec)
            name = f"attention, {shown(context, batch)}, `{codec}`"
            yield _bandwidth_line(row, name, percent, peers)
            if codec == "int4":
                yield _speed_line(row, bf16, f"{name} against `bf16`")


def _bandwidth_line(row: Row | None, name: str, percent: int, peers: str) -> Line:
    target = f">= {percent} % of copy"
    if row is None:
        return Line(name, target)
    reached = row["bandwidth_percent"]
    times = f"{row['floor_ms']:.3f} ms", f"{row['ms']:.3f} ms"
    return Line(name, target, *times, f"{reached:.0f} %", peers, reached >= percent)


def _speed_line(row: Row | None, base: Row | None, name: str) -> Line:
    target = f">= {INT4_SPEED} x as fast"
    if row is None or base is None:
        return Line(name, target)
    speed = base["ms"] / row["ms"]
    return Line(name, target, reached=f"{row['ms']:.3f} ms", ratio=f"{speed:.2f} x", met=speed >= INT4_SPEED)


def step_lines(found: Found) -> Iterator[Line]:
    for context, batch in SHAPES:
        for mode, most in (("captured", CAPTURED[context, batch]), ("compiled", COMPILED)):
            row = _step(found, context, batch, mode)
            name, target = f"step, {shown(context, batch)}, 8x, {mode}", f"<= {most} x floor"
            if row is None:
                yield Line(name, target)
                continue
            times = f"{row['floor_ms']:.2f} ms", f"{row['mean_ms']:.2f} ms, {row['tokens_per_s']:,.0f} tokens/s"
            peers = _step_peers(found, context, batch)
            yield Line(name, target, *times, f"{row['times_floor']:.2f} x", peers, row["times_floor"] <= most)


def _step(found: Found, context: int, batch: int, system: str, heads: str = "unequal") -> Row | None:
    here: dict[str, Any] = {"question": "step", "context": context, "batch": batch}
    return found.one(**here, system=system, heads=heads, codec="native")


def _step_peers(found: Found, context: int, batch: int) -> str:
    plain = found.one(question="step", system="DynamicCache", context=context, batch=batch)
    rows = [plain, *found.all(question="peer", length=context, batch=batch)]
    names = {row["system"]: row for row in rows if row is not None}
    full = _step(found, context, batch, "captured", heads="full")
    own = [] if full is None else [f"kvfold `full`, captured {full['mean_ms']:.1f} ms"]
    return "; ".join([*own, *(f"{name} {_or_outcome(row, 'ms', '{:.1f} ms')}" for name, row in names.items())])


def _or_outcome(row: Row, key: str, form: str) -> str:
    return form.format(row[key]) if row.get(key) is not None else "out of memory"


def share_lines(found: Found) -> Iterator[Line]:
    """What attention and its bookkeeping add to a step, and what heads of unequal length cost."""
    for context, batch in SHAPES:
        row, name = _step(found, context, batch, "compiled"), f"step, {shown(context, batch)}"
        without = _step(found, context, batch, "compiled without attention")
        equal = _step(found, context, batch, "compiled", heads="equal")
        yield _share_line(row, without, f"{name}: share of attention")
        yield _heads_line(row, equal, f"{name}: unequal heads against equal")


def _share_line(row: Row | None, without: Row | None, name: str) -> Line:
    target = f"<= {OWN_SHARE} x floor"
    if row is None or without is None:
        return Line(name, target)
    own = row["mean_ms"] - without["mean_ms"]
    ratio = own / row["kv_floor_ms"]
    times = f"{row['kv_floor_ms']:.2f} ms", f"{own:.2f} ms"
    return Line(name, target, *times, f"{ratio:.2f} x", met=ratio <= OWN_SHARE)


def _heads_line(row: Row | None, equal: Row | None, name: str) -> Line:
    target = f"<= {HEADS} x"
    if row is None or equal is None:
        return Line(name, target)
    ratio = row["mean_ms"] / equal["mean_ms"]  # of the same number of slots
    reached = f"{row['mean_ms']:.2f} ms, equal {equal['mean_ms']:.2f} ms"
    return Line(name, target, "", reached, f"{ratio:.2f} x", met=ratio <= HEADS)


def prefill_lines(found: Found) -> Iterator[Line]:
    added, peak = (_prefill(found, length, POLICY) for length in (32768, 131072))
    name, target = f"prefill, 32k, `{POLICY}`", f"<= {ADDED_PERCENT:g} % added"
    if added is None:
        yield Line(name, target)
    else:
        percent, times = added["added_to_dynamic_percent"], (f"{added['floor_s']:.2f} s", f"{added['s']:.3f} s")
        peers = _prefill_peers(found, 32768, "s", "{:.3f} s")
        yield Line(name, target, *times, f"{percent:+.1f} %", peers, percent <= ADDED_PERCENT)
    name, target = f"prefill, 128k, `{POLICY}`: peak memory", f"<= {PEAK_GB:g} GB"
    if peak is None:
        yield Line(name, target)
    else:
        reached, peers = peak["peak_GB"], _prefill_peers(found, 131072, "peak_GB", "{:.1f} GB")
        yield Line(name, target, "", f"{reached:.1f} GB, {peak['s']:.1f} s", "", peers, reached <= PEAK_GB)
    yield _shortened_line(found)


def _shortened_line(found: Found) -> Line:
    whole, short = (_prefill(found, 16384, system) for system in SHORTENED)
    name, target = f"prefill, 16k, `{SHORTENED[1]}`", f">= {SHORTENED_SPEED} x as fast as `{SHORTENED[0]}`"
    if whole is None or short is None:
        return Line(name, target)
    speed = whole["s"] / short["s"]
    peers = f"{_prefill_peers(found, 16384, 's', '{:.3f} s')}; `{SHORTENED[0]}` {whole['s']:.3f} s"
    return Line(name, target, "", f"{short['s']:.3f} s", f"{speed:.2f} x", peers, speed >= SHORTENED_SPEED)


def _prefill(found: Found, length: int, system: str) -> Row | None:
    return found.one(question="prefill", length=length, system=system)


def _prefill_peers(found: Found, length: int, key: str, form: str) -> str:
    plain = _prefill(found, length, "DynamicCache")
    own = [] if plain is None else [f"DynamicCache {form.format(plain[key])}"]
    theirs = found.all(question="peer", length=length, batch=1)
    column = {"s": "prefill_s"}.get(key, key)
    return "; ".join([*own, *(f"{row['system']} {_or_outcome(row, column, form)}" for row in theirs)])


def capacity_lines(found: Found) -> Iterator[Line]:
    rows = found.all(question="capacity", length=32768)
    own = next((row for row in reversed(rows) if row["system"].startswith("kvfold")), None)
    peers = [row for row in rows if row["system"] == "DynamicCache"]
    targets = f">= {HELD} sequences", f">= {TOKENS_PER_S:,} tokens/s"
    if own is None:
        yield from (Line("held, 32k, 8x, `int4`", targets[0]), Line("decoding 256 of them", targets[1]))
        return
    peer = "" if not peers else f"DynamicCache {peers[-1]['fits']}"
    yield Line("held, 32k, 8x, `int4`", targets[0], "", f"{own['fits']}", "", peer, own["fits"] >= HELD)
    best = max(peers, key=lambda row: float(row["tokens_per_s"]), default=None)
    peer = "" if best is None else f"DynamicCache {best['tokens_per_s']:,.0f} tokens/s with {best['batch']}"
    reached = f"{own['tokens_per_s']:,.0f} tokens/s, {own['mean_ms']:.1f} ms"
    times = f"{own['floor_ms']:.1f} ms", reached, f"{own['times_floor']:.2f} x"
    is_met = own["batch"] >= 256 and own["tokens_per_s"] >= TOKENS_PER_S
    yield Line(f"decoding {own['batch']} of them", targets[1], *times, peer, is_met)


def lookup_lines(found: Found) -> Iterator[Line]:
    for prompt in ("edit", "quote"):
        name, target = f"prompt lookup, {prompt}", f">= {LOOKUP_SPEED} x tokens/s; fp32 identical"
        fast, exact = (_lookup(found, prompt, dtype) for dtype in ("torch.bfloat16", "torch.float32"))
        if fast is None or exact is None:
            yield Line(name, target)
            continue
        same = exact["same"] == exact["num_tokens"]
        reached = f"{fast['tokens_per_s']:,.0f} tokens/s, fp32 {'identical' if same else 'differs'}"
        peers = f"without drafts {fast['plain_tokens_per_s']:,.0f} tokens/s"
        yield Line(
            name, target, "", reached, f"{fast['speedup']:.2f} x", peers, same and fast["speedup"] >= LOOKUP_SPEED
        )


def _lookup(found: Found, prompt: str, dtype: str) -> Row | None:
    return found.one(question="lookup", prompt=prompt, policy="full", dtype=dtype)


def shown(context: int, batch: int) -> str:
    return f"{context // 1024}k x {batch}"


def table(found: Sequence[Line]) -> str:
    return markdown_table(COLUMNS, (line.cells() for line in found))
