"""The measured part of docs/research/gpu.md and its plot: the table of targets, then what every part measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.docs_section import with_section
from benchmarks.gpu.targets import lines, shown, table
from benchmarks.rows import RESULTS, ROOT, Row, markdown_table, read_rows, svg_pyplot
from kvfold.errors import InputError

PAGE, PLOT = ROOT / "docs" / "research" / "gpu.md", ROOT / "docs" / "research" / "gpu.svg"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
FILES = {
    "attention": "gpu_attention", "step": "gpu_decode", "prefill": "gpu_prefill", "capacity": "gpu_capacity",
    "lookup": "lookup", "peers": "peers_gpu", "sweep": "gpu_sweep",
}  # fmt: skip
FACTS = ("device", "torch", "transformers", "commit", "date")
_COLOURS = {"bf16": "tab:blue", "int8": "tab:orange", "int4": "tab:green"}
_STYLES = {1: "--", 8: "-"}  # tokens of context per slot that stays

Column = tuple[str, Callable[[Row], str]]


def part_rows(part: str, run: str | None = None, folder: Path = RESULTS) -> list[Row]:
    """Rows of a part that belong to a run of the table; by default to its last. Prompt lookup is run for each dtype,
    prefill and the sweep for each length, so their last rows are those of each."""
    path = folder / f"{FILES[part]}.jsonl"
    every = read_rows(path) if path.exists() else []
    if part == "lookup" and run is None:
        on_gpu = [row for row in every if "cpu" not in row["device"].lower()]
        return list({(row["prompt"], row["policy"], row["dtype"]): row for row in on_gpu}.values())
    if part == "sweep" and run is None:
        return list({(row["context"], row["batch"], row["keep"], row["codec"]): row for row in every}.values())
    if part == "prefill" and run is None:
        last = {row["length"]: _origin(row) for row in every}
        return [row for row in every if _origin(row) == last[row["length"]]]
    rows = [row for row in every if "run" in row]
    chosen = run or (rows[-1]["run"] if rows else None)
    return [row for row in rows if row["run"] == chosen]


def _origin(row: Row) -> tuple[object, ...]:
    """What rows of one run have in common, be it a run of the table or of one script."""
    return tuple(row.get(key) for key in ("run", "commit", "date"))


def write_page() -> None:
    rows = {part: part_rows(part) for part in FILES}
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), BEGIN, END, body(rows)), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} written")
    if rows["sweep"]:
        draw(rows["sweep"], PLOT)
        print(f"{PLOT.relative_to(ROOT)} drawn")


def body(rows: Mapping[str, Sequence[Row]]) -> str:
    """Everything between the markers."""
    every = [row for part in rows.values() for row in part]
    if not every:
        raise InputError("benchmarks/results has no rows of `python -m benchmarks.gpu table`; run it on a GPU first")
    found = [f"{caption(every)}\n\n## Targets\n\n{table(lines(every))}"]
    found += [section(title, rows[part], COLUMNS[part]) for part, title in TITLES.items() if rows[part]]
    if rows["sweep"]:
        found.append("## Over context lengths\n\n![bytes and tokens a second over context lengths](gpu.svg)")
    return "\n\n".join(found)


def caption(rows: Sequence[Row]) -> str:
    values = {key: list(dict.fromkeys(str(row[key]) for row in rows if key in row)) for key in FACTS}
    told = "; ".join(f"{key} {', '.join(found)}" for key, found in values.items())
    rates = [row["copy_TB_s"] for row in rows if "copy_TB_s" in row]
    copied = f"; copy bandwidth {min(rates):.2f} to {max(rates):.2f} TB/s" if rates else ""
    return f"{told}{copied}."


def section(title: str, rows: Iterable[Row], columns: Sequence[Column]) -> str:
    cells = ([value(row) for _, value in columns] for row in rows if row["question"] != "phases")
    return f"## {title}\n\n{markdown_table([name for name, _ in columns], cells)}"


def number(key: str, form: str = ".2f") -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else format(row[key], form)


def text(key: str) -> Callable[[Row], str]:
    return lambda row: str(row.get(key, ""))


def shape(row: Row) -> str:
    return shown(row.get("context") or row["length"], row.get("batch", 1))


def _mean(row: Row) -> str:
    return number("mean_ms" if "mean_ms" in row else "ms")(row)


TITLES = {
    "attention": "Attention alone", "step": "A whole step", "prefill": "Prefill", "capacity": "Many sequences",
    "peers": "kvpress", "lookup": "Prompt lookup",
}  # fmt: skip
_STEP: tuple[Column, ...] = (
    ("ms", _mean),
    ("tokens/s", number("tokens_per_s", ",.0f")),
    ("floor, ms", number("floor_ms")),
    ("times the floor", number("times_floor")),
)
COLUMNS: dict[str, tuple[Column, ...]] = {
    "attention": (
        ("context", shape), ("", text("system")), ("codec", text("codec")), ("ms", number("ms", ".3f")),
        ("floor, ms", number("floor_ms", ".3f")), ("of bandwidth, %", number("bandwidth_percent", ".0f")),
    ),
    "step": (
        ("context", shape), ("", text("system")), ("heads", text("heads")), ("codec", text("codec")), *_STEP,
    ),
    "prefill": (
        ("tokens", number("length", ",")), ("", text("system")), ("s", number("s", ".3f")),
        ("added to DynamicCache, %", number("added_to_dynamic_percent", "+.1f")),
        ("added to full, %", number("added_to_full_percent", "+.1f")), ("times the floor", number("times_floor")),
        ("peak GB", number("peak_GB", ".1f")),
    ),
    "capacity": (
        ("", text("system")), ("fit", number("fits", ",")), ("MB each", number("MB_each", ",.0f")),
        ("decoding", number("batch", ",")), *_STEP,
    ),
    "peers": (
        ("context", shape), ("", text("system")), ("prefill s", number("prefill_s")),
        ("peak GB", number("peak_GB", ".1f")), *_STEP,
    ),
    "lookup": (
        ("", text("prompt")), ("dtype", text("dtype")), ("tokens", number("num_tokens", ",")),
        ("first tokens that agree", number("same", ",")), ("a pass", number("tokens_per_pass")),
        ("tokens/s without", number("plain_tokens_per_s", ",.0f")), ("with drafts", number("tokens_per_s", ",.0f")),
        ("times", number("speedup")),
    ),
}  # fmt: skip


def draw(rows: Sequence[Row], path: Path) -> None:
    """Bytes a second of attention and tokens a second of a step over the length of the context."""
    pyplot = svg_pyplot()
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(6, 7), sharex=True)  # below each other: a phone is narrow
    for (codec, keep), points in plotted(rows).items():
        style: dict[str, Any] = {"color": _COLOURS[codec], "linestyle": _STYLES[keep], "marker": "o", "markersize": 4}
        label = f"{codec}, all slots" if keep == 1 else f"{codec}, {keep}x"
        lengths = [row["context"] for row in points]
        upper.plot(lengths, [row["attention_GB_s"] / 1e3 for row in points], label=label, **style)
        lower.plot(lengths, [row["tokens_per_s"] for row in points], **style)
    upper.axhline(rows[0]["copy_TB_s"], color="grey", linewidth=1, label="copy")
    upper.set(ylabel="attention, TB/s", ylim=(0, None))
    lower.set(ylabel=f"tokens/s, {rows[0]['batch']} sequences", ylim=(0, None), xlabel="tokens of context")
    ticks = sorted({row["context"] for row in rows})
    lower.set_xscale("log", base=2)
    lower.set_xticks(ticks, [f"{tick // 1024}k" for tick in ticks])
    figure.legend(loc="upper center", ncols=3, frameon=False, handlelength=3)
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def plotted(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows of each codec and ratio, by length."""
    kinds = dict.fromkeys((row["codec"], row["keep"]) for row in rows)
    ordered = sorted(rows, key=lambda row: int(row["context"]))
    return {kind: [row for row in ordered if (row["codec"], row["keep"]) == kind] for kind in kinds}
