"""docs/research/gpu.svg: bytes a second of attention, and tokens a second of a step, by length of the context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_targets import Row
from kvfold.errors import MissingExtra

_COLOURS = {"bf16": "tab:blue", "int8": "tab:orange", "int4": "tab:green"}
_STYLES = {1: "--", 8: "-"}  # tokens of context per slot that stays


def draw(rows: Sequence[Row], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("plots need matplotlib; install it with: pip install 'kvfold[bench]'") from None

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvfold"  # the same rows draw the same file
    from matplotlib import pyplot

    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=(6, 7), sharex=True)  # below each other: a phone is narrow
    for (codec, keep), points in lines(rows).items():
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


def lines(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    """Rows of each codec and ratio, by length."""
    kinds = dict.fromkeys((row["codec"], row["keep"]) for row in rows)
    ordered = sorted(rows, key=lambda row: int(row["context"]))
    return {kind: [row for row in ordered if (row["codec"], row["keep"]) == kind] for kind in kinds}
