"""From cells to a table: mean scores with bootstrap intervals, policy by policy, beside the full cache of the same run.

A score is the mean over tasks of the mean over prompts, in percent. Its interval resamples prompts within each task
(percentile bootstrap, Efron 1979); half of its width is shown. Bytes are shares of the ordinary bf16 cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvfold.bench.page import written
from kvfold.bench.plans import PLANS
from kvfold.bench.rows import MODES, OWN_POLICIES, OWN_PROSE, Cell, Facts, Mode, read_cells
from kvfold.bench.sizes import FULL

BEGIN = "<!-- needle: begin; written by `python benchmarks/needle.py --docs` -->"
END = "<!-- needle: end -->"
NO_SIZE = ""
_RESAMPLES = 2000


@dataclass(frozen=True)
class Result:
    """One place of the table; `mean` is None where the policy could not run."""

    policy: str
    size: str
    mode: Mode
    num_prompts: int
    mean: float | None
    half_width: float
    bytes_percent: float
    note: str

    @property
    def text(self) -> str:
        return self.note or "-" if self.mean is None else f"{self.mean:.0f} ±{self.half_width:.0f}"


Found = dict[tuple[str, str, Mode], Result]  # by policy, size and mode


def interval(scores_by_task: Sequence[Sequence[float]], *, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the mean over tasks of mean scores."""
    random = np.random.default_rng(seed)
    means = np.zeros(_RESAMPLES)
    for scores in scores_by_task:
        picked = random.integers(0, len(scores), (_RESAMPLES, len(scores)))
        means += np.asarray(scores)[picked].mean(axis=1) / len(scores_by_task)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def results(cells: Iterable[Cell]) -> list[Result]:
    """One result per (policy, size, mode), in the order the cells come in."""
    groups: dict[tuple[str, str, Mode], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.policy, cell.size, cell.mode), []).append(cell)
    return [_result(*key, members) for key, members in groups.items()]


def _result(policy: str, size: str, mode: Mode, cells: list[Cell]) -> Result:
    by_task: dict[str, list[float]] = {}
    for cell in cells:
        if cell.scores:
            by_task.setdefault(cell.task, []).extend(cell.scores)
    note = next((cell.note for cell in cells if cell.note), "")
    if not by_task:
        return Result(policy, size, mode, 0, None, 0.0, 0.0, note)
    counts = [len(cell.scores) for cell in cells]
    mean = sum(sum(scores) / len(scores) for scores in by_task.values()) / len(by_task)
    low, high = interval(list(by_task.values()))
    ratio = float(np.average([cell.bytes_ratio for cell in cells], weights=counts))
    return Result(policy, size, mode, sum(counts), 100 * mean, 50 * (high - low), 100 * ratio, note)


def table(cells: Sequence[Cell]) -> str:
    """Markdown: policies down, question known and unknown by size across, then the bytes at each size.

    Policies that are complete without a size follow in a table of their own.
    """
    found = {(result.policy, result.size, result.mode): result for result in results(cells)}
    sized = {key: result for key, result in found.items() if key[1] != NO_SIZE or key[0] == FULL}
    others = {key: result for key, result in found.items() if key not in sized}
    return "\n\n".join(_table(part) for part in (sized, others) if part)


def _table(found: Found) -> str:
    modes = [mode for mode in MODES if any(mode == each for _, _, each in found)]
    sizes = list(dict.fromkeys(size for _, size, _ in found if size != NO_SIZE)) or [NO_SIZE]
    headings = ["policy", *(f"{mode} {size}".strip() for mode in modes for size in sizes), "bytes, % of full"]
    lines = [_line(headings), _line(["---"] * len(headings))]
    for policy in dict.fromkeys(policy for policy, _, _ in found):
        row = [[_place(found, policy, size, mode) for size in sizes] for mode in modes]
        texts = [place.text if place else "-" for places in row for place in places]
        lines.append(_line([f"`{policy}`", *texts, _bytes(row, policy, found)]))
    return "\n".join(lines)


def _place(found: Found, policy: str, size: str, mode: Mode) -> Result | None:
    """The full cache is the same at all sizes."""
    return found.get((policy, size, mode)) or found.get((policy, NO_SIZE, mode))


def _bytes(row: list[list[Result | None]], policy: str, found: Found) -> str:
    """By size, the mean of both modes; a policy without a size has one figure."""
    columns = list(zip(*row, strict=True))
    if any((policy, NO_SIZE, mode) in found for mode in MODES):
        columns = columns[:1]
    shares = [[place.bytes_percent for place in places if place and place.num_prompts] for places in columns]
    return " / ".join(f"{sum(share) / len(share):.0f}" if share else "-" for share in shares)


def caption(cells: Sequence[Cell]) -> str:
    """One line that says what the table was measured on."""

    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(cell.facts, name)) for cell in cells))

    num_prompts = max(result.num_prompts for result in results(cells))
    return (
        f"{num_prompts} prompts of {all_of('tokens')} tokens (seed {all_of('seed')}, haystack {all_of('haystack')}); "
        f"{all_of('device')}, {all_of('dtype')}, {all_of('versions')}; commit {all_of('commit')}, {all_of('date')}."
    )


def section(path: Path) -> str:
    """Heading, caption and table of one file of results."""
    cells = read_cells(path)
    return f"## {heading(cells[0].facts)}\n\n{caption(cells)}\n\n{table(cells)}"


def heading(facts: Facts) -> str:
    """The model; results in another haystack than the project's own, of another plan, or of prompts of another length
    than the plan's, stand on their own."""
    parts = [facts.model]
    if facts.haystack != OWN_PROSE:
        file_name, _digest = facts.haystack.rsplit(" ", 1)
        parts.append(Path(file_name).stem)
    if facts.plan != OWN_POLICIES:
        parts.append(facts.plan)
        if facts.plan in PLANS and facts.tokens != PLANS[facts.plan].tokens:
            parts.append(f"{facts.tokens} tokens")
    return ", ".join(parts)


def with_sections(page: str, paths: Sequence[Path]) -> str:
    """The page with the part between the markers written anew from files of results."""
    return written(page, BEGIN, END, "\n\n".join(section(path) for path in paths))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
