"""Questions about documents nobody tuned to: score against cache bytes, kvfold's policies and kvpress' side by side.

    python -m benchmarks.peers natural RUNS        docs/natural_questions.svg, and its table in docs/research/peers.md

RUNS/kvfold is a run of `kvfold bench`, RUNS/peer of kvpress over the same prompts. A point is the mean over tasks of
the mean score of a task. kvfold's bytes are those it holds; kvpress' are the share of slots it is told to keep, also
for presses that mask slots and free none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.peers.collect import PEER
from benchmarks.peers.ours import SIDE
from benchmarks.rows import markdown_table, svg_pyplot
from kvfold.bench.record import Recorded, Row, read_run
from kvfold.errors import InputError

FULL, FULL_PEER = "full", "transformers:full"
_RESAMPLES = 2000
Place = tuple[str, int]  # task, index


@dataclass(frozen=True)
class Point:
    """One policy at one size, over the prompts that all points share."""

    policy: str
    memory: str
    share: float  # of the bf16 cache's bytes
    held: float  # likewise, what the cache really holds
    score: float
    loss: tuple[float, float, float]  # score less that of the same library's full cache, with its 95 % interval

    @property
    def is_peer(self) -> bool:
        return self.policy.startswith("kvpress:")


def points(runs: Path) -> tuple[list[Point], int, float]:
    """Every policy at every size, the number of prompts, and the full cache's score."""
    cells: dict[tuple[str, str], dict[Place, Row]] = {}
    for recorded in _read(runs):
        for row in recorded.rows:
            if row.score is not None and row.mode == "unknown":
                cells.setdefault((row.policy, row.memory), {})[row.task, row.index] = row
    places = sorted(set.intersection(*(set(rows) for rows in cells.values())))  # the others are too short for some
    if len(places) < 2:
        raise InputError(f"the two runs in {runs} share {len(places)} prompts; run both over the same ones")
    whole = {name: _scores(cells[name, "100%"], places) for name in (FULL, FULL_PEER)}
    found = [
        _point(*cell, [rows[place] for place in places], whole[FULL_PEER if cell[0].startswith("kvpress:") else FULL])
        for cell, rows in cells.items()
        if cell[0] not in whole
    ]
    return found, len(places), _mean(whole[FULL])


def _read(runs: Path) -> tuple[Recorded, Recorded]:
    return read_run(runs / SIDE), read_run(runs / PEER)


Scores = dict[str, list[float]]  # by task


def _scores(rows: dict[Place, Row], places: Sequence[Place]) -> Scores:
    found: Scores = {}
    for place in places:
        found.setdefault(place[0], []).append(100 * (rows[place].score or 0.0))
    return found


def _mean(scores: Scores) -> float:
    return float(np.mean([np.mean(each) for each in scores.values()]))


@cache
def _resamples(lens: tuple[int, ...]) -> list[NDArray[np.int64]]:
    """Prompts drawn for each task, [resamples, prompts]: the same for all policies."""
    random = np.random.default_rng(0)
    drawn = [[random.integers(0, length, length) for length in lens] for _ in range(_RESAMPLES)]
    return [np.stack(each) for each in zip(*drawn, strict=True)]


def _point(policy: str, memory: str, rows: list[Row], whole: Scores) -> Point:
    held = float(np.mean([row.resident_bytes / row.full_bytes for row in rows]))
    nominal = float(memory.removesuffix("%")) / 100
    scores = _scores({(row.task, row.index): row for row in rows}, [(row.task, row.index) for row in rows])
    differences = [np.subtract(scores[task], whole[task]) for task in scores]
    drawn = zip(differences, _resamples(tuple(map(len, differences))), strict=True)
    means = np.mean([each[prompts].mean(axis=1) for each, prompts in drawn], axis=0)
    low, high = np.percentile(means, (2.5, 97.5))
    loss = (_mean(scores) - _mean(whole), float(low), float(high))
    return Point(policy, memory, nominal if policy.startswith("kvpress:") else held, held, _mean(scores), loss)


def table(runs: Path) -> str:
    """Caption and Markdown table."""
    found, num_prompts, whole = points(runs)
    ours, peer = _read(runs)
    tasks = ", ".join(name.partition(":")[2] for name in ours.run.workloads)
    packages = ", ".join(f"{name} {peer.run.versions[name]}" for name in ("kvpress", "transformers", "torch"))
    caption = (
        f"{ours.run.model}, {ours.run.dtype.split('/')[0]}, {ours.run.device}: {num_prompts} prompts of at most "
        f"{ours.run.lengths[0]:,} tokens ({tasks}; seed {ours.run.seed}), question-agnostic. "
        f"The full cache scores {whole:.1f}. kvfold at commit {ours.run.commit}, {ours.run.started[:10]}; {packages}."
    )
    lines = []
    for point in sorted(found, key=lambda point: (point.is_peer, point.policy, -point.share)):
        difference, low, high = point.loss
        loss = f"{difference:+.1f} [{low:+.1f}, {high:+.1f}]"
        lines.append([f"`{point.policy}`", point.memory, f"{point.held:.1%}", f"{point.score:.1f}", loss])
    head = ("policy", "size asked for", "bytes held", "score", "difference to the full cache")
    return f"{caption}\n\n{markdown_table(head, lines)}"


_COLOURS = ("#0b6e4f", "#1f9d74", "#73c6a5", "#b3412e", "#d9734e", "#e3a45f", "#8d5a97", "#b98fc4")


def draw(runs: Path, path: Path) -> None:
    pyplot = svg_pyplot()
    pyplot.rcParams.update({"font.size": 11, "font.family": "sans-serif"})
    found, _, whole = points(runs)
    figure, axes = pyplot.subplots(figsize=(8, 4.4))
    axes.axhline(whole, color="#555555", linewidth=1, linestyle=":")
    axes.text(0.52, whole + 0.5, f"full cache: {whole:.0f}", ha="left", color="#555555")
    ends = []
    for (policy, line), colour in zip(_lines(found), _COLOURS, strict=False):
        ordered = sorted(line, key=lambda point: point.share)
        style = "--" if line[0].is_peer else "-"
        marker = "s" if line[0].is_peer else "o"
        shares, scores = [point.share for point in ordered], [point.score for point in ordered]
        axes.plot(shares, scores, style, marker=marker, color=colour, linewidth=1.6 if line[0].is_peer else 2.4)
        ends.append((scores[0], shares[0], policy.replace(":", " ") if line[0].is_peer else f"kvfold {policy}", colour))
    for y, (score, share, label, colour) in zip(
        _apart([end[0] for end in sorted(ends)], 4.2), sorted(ends), strict=True
    ):
        axes.annotate(
            label, (share, score), (1.04, y), ("data"), textcoords=("axes fraction", "data"), color=colour, va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "relpos": (0, 0.5)},
        )  # fmt: skip
    ticks = [0.5, 0.25, 0.125, 0.0625]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, ["50 %", "25 %", "12.5 %", "6.25 %"])
    axes.minorticks_off()
    axes.set_xlim(0.56, 0.058)
    axes.set_ylim(20, None)
    axes.set(xlabel="KV cache bytes, share of the bf16 cache", ylabel="mean score of four question-answering tasks")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def _lines(found: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    """What the plot shows: kvfold's policies in 4 bits, the best first, then all presses."""
    shown = [point for point in found if point.is_peer or "int4" in point.policy]
    order = sorted({point.policy for point in shown}, key=lambda name: _rank(shown, name))
    for policy in order:
        yield policy, [point for point in shown if point.policy == policy]


def _rank(found: Sequence[Point], policy: str) -> tuple[bool, float]:
    smallest = min((point for point in found if point.policy == policy), key=lambda point: point.share)
    return smallest.is_peer, -smallest.score


def _apart(values: Sequence[float], gap: float) -> list[float]:
    """Sorted label places, moved up until neighbours are `gap` apart, centred on where they wanted to be."""
    placed: list[float] = []
    for value in values:
        placed.append(max(value, placed[-1] + gap) if placed else value)
    shift = (sum(placed) - sum(values)) / len(values)
    return [place - min(shift, placed[0]) for place in placed]
