"""Tables of streaming perplexity: means by block over streams, relative to the first block and to the control.

Log losses are averaged, then exponentiated: the perplexity over streams is that of all their tokens together. Ratios
are differences of log losses, stream by stream, so the text cancels out.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.docs_section import with_section
from benchmarks.stream_blocks import Block
from kvfold.errors import InputError

CONTROL = "control"
BEGIN = "<!-- streams: begin; written by `python -m benchmarks.stream_perplexity --docs` -->"
END = "<!-- streams: end -->"
_FACTS = ("device", "dtype", "torch", "transformers", "commit", "date")


@dataclass(frozen=True)
class Mean:
    """One block of one run over its streams. Ratios to the control are None where it did not read these streams."""

    run: str
    policy: str
    block: int
    end: int
    num_streams: int
    perplexity: float
    to_first: float
    to_control: float | None
    control_range: tuple[float, float] | None  # the smallest and the largest ratio of a stream
    arena_bytes: int  # the largest of a stream, as all bytes here
    cuda_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True)
class Rows:
    """The blocks of a run and what they were measured on."""

    blocks: list[Block]
    facts: list[dict[str, Any]]


def read_rows(paths: Iterable[Path]) -> Rows:
    """The rows of one or several files, such as the shards of a run; no block may count twice."""
    found, facts = dict[tuple[str, int, int], Block](), list[dict[str, Any]]()
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            block, about = _parse(path, number, line)
            if block.key in found:
                raise InputError(f"{path}, line {number}: {block.key} occurs twice; give each shard of a run once")
            found[block.key] = block
            if facts and about["workload"] != facts[0]["workload"]:
                raise InputError(f"{path}, line {number}, is of {about['workload']}, not of {facts[0]['workload']}")
            facts += [about] if about not in facts else []
    if not found:
        raise InputError("there are no blocks yet; run the streams first")
    _check_whole(found.values())
    return Rows(list(found.values()), facts)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); give files that a run wrote") from None


def _parse(path: Path, number: int, line: str) -> tuple[Block, dict[str, Any]]:
    try:
        found = json.loads(line)
        block = Block(**{item.name: found.pop(item.name) for item in fields(Block)})
        if not isinstance(found["workload"], str):
            raise TypeError("its workload is no text")
        return block, found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}, line {number}, is no block of a stream: {error}") from None


def _check_whole(blocks: Iterable[Block]) -> None:
    """A mean over different streams in different blocks would show their difficulty, not drift."""
    counts: dict[tuple[str, int], int] = {}
    for block in blocks:
        counts[block.run, block.stream] = counts.get((block.run, block.stream), 0) + 1
    most = max(counts.values())
    for (run, stream), count in counts.items():
        if count < most:
            raise InputError(f'stream {stream} of run "{run}" has {count} of {most} blocks; run it to its end first')


def means(blocks: Sequence[Block]) -> list[Mean]:
    """One mean per (run, block), in order of blocks within runs as they come."""
    groups: dict[tuple[str, int], list[Block]] = {}
    for block in sorted(blocks, key=lambda block: (block.block, block.stream)):
        groups.setdefault((block.run, block.block), []).append(block)
    runs = list(dict.fromkeys(block.run for block in blocks))
    ordered = sorted(groups, key=lambda key: (runs.index(key[0]), key[1]))
    return [_mean(groups[key], groups[key[0], 0], groups.get((CONTROL, key[1]), [])) for key in ordered]


def _mean(members: list[Block], first: list[Block], control: list[Block]) -> Mean:
    loss = statistics.fmean(block.log_loss for block in members)
    control_loss = {block.stream: block.log_loss for block in control}
    gaps = [block.log_loss - control_loss[block.stream] for block in members if block.stream in control_loss]
    return Mean(
        members[0].run,
        members[0].policy,
        members[0].block,
        members[0].end,
        len(members),
        perplexity=math.exp(loss),
        to_first=math.exp(loss - statistics.fmean(block.log_loss for block in first)),
        to_control=math.exp(statistics.fmean(gaps)) if gaps else None,
        control_range=(math.exp(min(gaps)), math.exp(max(gaps))) if gaps else None,
        arena_bytes=max(block.arena_bytes for block in members),
        cuda_bytes=_largest([block.cuda_bytes for block in members]),
        host_bytes=_largest([block.host_bytes for block in members]),
    )


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def table(found: Sequence[Mean]) -> str:
    """Markdown: blocks down; perplexity of every run across, then ratios and memory of the first run."""
    runs = list(dict.fromkeys(mean.run for mean in found))
    place = {(mean.run, mean.block): mean for mean in found}
    headings = ["tokens read", *runs, "to first block", "to control (range)"]
    headings += ["arena MB", "CUDA MB", "host MB"]
    lines = [_line(headings), _line(["---"] * len(headings))]
    for mean in (mean for mean in found if mean.run == runs[0]):
        perplexities = [f"{place[run, mean.block].perplexity:.2f}" for run in runs]
        memory = [_megabytes(value) for value in (mean.arena_bytes, mean.cuda_bytes, mean.host_bytes)]
        lines.append(_line([f"{mean.end:,}", *perplexities, f"{mean.to_first:.3f}", _to_control(mean), *memory]))
    return "\n".join(lines)


def _to_control(mean: Mean) -> str:
    if mean.to_control is None or mean.control_range is None:
        return "-"
    low, high = mean.control_range
    return f"{mean.to_control:.3f} ({low:.3f}-{high:.3f})"


def _megabytes(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / 1e6:,.1f}"


def caption(rows: Rows, found: Sequence[Mean]) -> str:
    """What was read, by which policies, on what."""
    streams = {mean.run: (mean.num_streams, mean.policy) for mean in found}
    runs = "; ".join(f"{run}: `{policy}`, {count} streams" for run, (count, policy) in streams.items())
    facts = "; ".join(", ".join(str(about[name]) for name in _FACTS if name in about) for about in rows.facts)
    return f"{rows.facts[0]['workload']}. {runs}. {facts}."


def with_table(page: str, path: Path) -> str:
    """The page with the part between its markers written from a file of rows; empty while there is none."""
    if not path.exists():
        return with_section(page, BEGIN, END, "")
    rows = read_rows([path])
    found = means(rows.blocks)
    return with_section(page, BEGIN, END, f"## Blocks of 10,000 tokens\n\n{caption(rows, found)}\n\n{table(found)}")


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
