"""Mean score over the share of tokens sent, a line for each selector and a panel for each run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.rows import svg_pyplot
from kvfold.bench.record import Row
from kvfold.bench.report.merge import FULL

_SELECTORS = {  # as docs name them
    "rank": ("rank", "#0b6e4f", "-"),
    "graph": ("graph", "#1f4e9d", "-"),
    "words": ("words (LLMLingua)", "#8d5a97", "--"),
    "fixed": ("fixed chunks by BM25", "#b98f1f", "--"),
    "shuffle": ("random sentences", "#777777", "--"),
    "head": ("head", "#b3412e", ":"),
    "ends": ("without the middle", "#d9734e", ":"),
    "tail": ("tail", "#e3a45f", ":"),
}


def selector_of(policy: str) -> str:
    """`rank` of `shorten(rank, 4x, keep=none)`; `fixed` where units are fixed chunks."""
    if "units=fixed" in policy:
        return "fixed"
    found = re.match(r"shorten\((\w+), \w+, keep=none\)$", policy)
    return found[1] if found else ""


def points(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """Share of tokens sent and mean score in percent, every task counting the same, by selector; "" is the full
    prompt."""
    found: dict[str, list[tuple[float, float]]] = {}
    for policy in dict.fromkeys(row.policy for row in rows):
        name = "" if policy == FULL else selector_of(policy)
        if name not in ("", *_SELECTORS) or (not name and policy != FULL):
            continue
        mine = [row for row in rows if row.policy == policy and row.score is not None]
        tasks = {row.task for row in mine}
        score = fmean(fmean(row.score for row in mine if row.task == task and row.score is not None) for task in tasks)
        found.setdefault(name, []).append((fmean(row.sent_share for row in mine), 100 * score))
    return {name: sorted(line, reverse=True) for name, line in found.items()}


def draw(panels: Mapping[str, Sequence[Row]], path: Path) -> None:
    pyplot = svg_pyplot()
    pyplot.rcParams.update({"font.size": 11, "font.family": "sans-serif"})
    figure, row_of_axes = pyplot.subplots(1, len(panels), figsize=(10.5, 3.8))
    for axes, (title, rows) in zip(row_of_axes, panels.items(), strict=True):
        found = points(rows)
        whole = found[""][0][1]
        axes.axhline(whole, color="#555555", linewidth=1, linestyle=":")
        axes.text(0.98, whole, f"full prompt: {whole:.0f}", ha="right", va="bottom", color="#555555", fontsize=9,
                  transform=axes.get_yaxis_transform())  # fmt: skip
        for name, (label, colour, style) in _SELECTORS.items():
            if name in found:
                shares, scores = zip(*found[name], strict=True)
                axes.plot(shares, scores, style, marker="o", color=colour, label=label)
        axes.set_xscale("log", base=2)
        axes.set_xticks([0.5, 0.25, 0.125], ["50 %", "25 %", "12.5 %"])
        axes.minorticks_off()
        axes.invert_xaxis()
        axes.set(title=title, xlabel="tokens sent, share of the prompt")
        axes.spines[["top", "right"]].set_visible(False)
    row_of_axes[0].set_ylabel("mean score")
    handles, labels = row_of_axes[0].get_legend_handles_labels()
    figure.tight_layout(rect=(0, 0, 0.77, 1))
    figure.legend(handles, labels, loc="center left", bbox_to_anchor=(0.77, 0.5), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
