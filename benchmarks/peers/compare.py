"""Two runs over the same prompts side by side: scores, their paired difference, and how many answers are the same.

Two implementations of one method on the same weights keep the same slots, up to ties and rounding, so their answers
should be equal token by token: a much sharper test than equal scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.docs_section import with_section
from benchmarks.peers.collect import PEER
from benchmarks.peers.ours import SIDE
from benchmarks.rows import ROOT, markdown_table
from kvfold.bench.record import Recorded, Row, read_run
from kvfold.bench.statistics import Estimate, mean_interval, paired_difference

PAGE = ROOT / "docs" / "research" / "peers.md"
Cell = tuple[str, str, str]  # policy, memory, mode


@dataclass(frozen=True)
class Line:
    """One method at one size in one mode, on both sides."""

    ours: str
    peer: str
    memory: str
    mode: str
    ours_score: Estimate
    peer_score: Estimate
    difference: Estimate  # ours less the peer's
    num_same: int  # answers that are equal
    ours_bytes: float  # of the ordinary bf16 cache's
    peer_bytes: float

    @property
    def verdict(self) -> str:
        return "differs" if self.difference.excludes_zero else "agrees"

    @property
    def cells(self) -> tuple[str, ...]:
        num = self.ours_score.num_samples
        return (
            f"`{self.ours}`", f"`{self.peer}`", self.mode, self.memory, _score(self.ours_score),
            _score(self.peer_score), f"{_points(self.difference)}", f"{self.num_same} of {num}",
            f"{self.ours_bytes:.0%} / {self.peer_bytes:.0%}", self.verdict,
        )  # fmt: skip


HEADINGS = (
    "kvfold", "peer", "question", "slots", "kvfold's score", "peer's score", "difference", "same answer",
    "bytes, kvfold / peer", "95 %",
)  # fmt: skip


def lines_of(ours: Recorded, peer: Recorded) -> Iterator[Line]:
    """In the order of the runs' policies; only what both sides have answered is compared."""
    mine, theirs = _cells(ours), _cells(peer)
    for name, other in zip(ours.run.policies, peer.run.policies, strict=True):
        for _, memory, mode in [cell for cell in mine if cell[0] == name]:
            pairs = _paired(mine[name, memory, mode], theirs.get((other, memory, mode), {}))
            if len(pairs) > 1:
                yield _line(name, other, memory, mode, pairs)


def _cells(recorded: Recorded) -> dict[Cell, dict[tuple[str, str, int], Row]]:
    found: dict[Cell, dict[tuple[str, str, int], Row]] = {}
    for row in recorded.rows:
        found.setdefault((row.policy, row.memory, row.mode), {})[row.workload, row.task, row.index] = row
    return found


def _paired(mine: dict[tuple[str, str, int], Row], theirs: dict[tuple[str, str, int], Row]) -> list[tuple[Row, Row]]:
    return [(row, theirs[place]) for place, row in mine.items() if place in theirs]


def _line(name: str, other: str, memory: str, mode: str, pairs: Sequence[tuple[Row, Row]]) -> Line:
    ours, peer = ([row.score or 0.0 for row in side] for side in zip(*pairs, strict=True))
    shares = [[row.resident_bytes / row.full_bytes for row in side] for side in zip(*pairs, strict=True)]
    return Line(
        name, other, memory, mode, mean_interval(ours), mean_interval(peer), paired_difference(ours, peer),
        sum(a.answer == b.answer for a, b in pairs), *(sum(share) / len(share) for share in shares),
    )  # fmt: skip


def _score(found: Estimate) -> str:
    return f"{100 * found.mean:.0f} [{100 * found.low:.0f}, {100 * found.high:.0f}]"


def _points(found: Estimate) -> str:
    return f"{100 * found.mean:+.0f} [{100 * found.low:+.0f}, {100 * found.high:+.0f}]"


def compare(runs: Path) -> str:
    """Caption and Markdown table of RUNS/kvfold against RUNS/peer."""
    ours, peer = read_run(runs / SIDE), read_run(runs / PEER)
    rows = [line.cells for line in lines_of(ours, peer)]
    table = markdown_table(HEADINGS, rows)
    return f"{caption(ours, peer)}\n\n{table}"


def caption(ours: Recorded, peer: Recorded) -> str:
    run, other = ours.run, peer.run
    tasks = ", ".join(run.workloads)
    packages = ", ".join(f"{name} {text}" for name, text in other.versions.items() if name != "python")
    return (
        f"{run.model}, {run.dtype.split('/')[0]}, {run.device}: {len(ours.prompts)} prompts of about {run.lengths[0]} "
        f"tokens ({tasks}; seed {run.seed}). kvfold at commit {run.commit}, {run.started[:10]}; peer: {packages}."
    )


def write_docs(runs: Path, table: Callable[[Path], str]) -> str:
    """Write the table of docs/research/peers.md that belongs to this folder."""
    what = "docs" if table is compare else "natural"
    begin = (
        f"<!-- {runs.name}: begin; written by `python -m benchmarks.peers {what} benchmarks/results/{runs.name}` -->"
    )
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_section(page, begin, f"<!-- {runs.name}: end -->", table(runs)), encoding="utf-8")
    return f"docs/research/{PAGE.name} written from {runs}"
