"""Write the tables of docs/read.md from rows kept in benchmarks/results/recurse.jsonl.

    python -m benchmarks.recurse_page

For each model, device and length of parts, the last run: a table of arms at each length, the length from which on
recursion is right more often than a truncated pass, and what sharing a prefix and batching save.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from statistics import fmean

from benchmarks.commands import argument_parser, run_main
from benchmarks.docs_section import with_section
from benchmarks.rows import RESULTS, ROOT, Row, markdown_table, read_rows
from kvfold.bench.statistics import Estimate, paired_difference

PAGE = ROOT / "docs" / "read.md"
KEPT = RESULTS / "recurse.jsonl"
BEGIN = "<!-- reading: begin; written by `python -m benchmarks.recurse_page` -->"
END = "<!-- reading: end -->"
ARMS = {
    "truncated": "one truncated pass",
    "shorten": "`shorten(rank)` and one pass",
    "sequential": "map-reduce, one call at a time, nothing shared",
    "recursive": "by parts",
}
_HEAD = ["tokens", "how", "right, 95 % interval", "calls", "seconds", "peak KV cache", "peak memory", "KV compression"]
_Z = 1.96  # of a 95 % interval
_MIN_SAMPLES = 4  # a bootstrap of fewer alike answers has no width


def kept() -> list[Row]:
    return read_rows(KEPT) if KEPT.exists() else []


def last_runs(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of the last run of each model, device and length of parts; models in the order of their first rows."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in ("model", "device", "chunk")), []).append(row)
    return [[row for row in group if _run(row) == _run(group[-1])] for group in groups.values()]


def _run(row: Row) -> object:
    """KVFOLD_RUN, or when it was started."""
    return row.get("run") or row["started"]


def wilson(right: int, count: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927), which has a width also where all samples are alike."""
    share, square = right / count, _Z**2 / count
    middle, half = share + square / 2, _Z * (share * (1 - share) / count + square / (4 * count)) ** 0.5
    return (middle - half) / (1 + square), (middle + half) / (1 + square)


def _answered(rows: Sequence[Row], kind: str, tokens: int, policy: str = "full") -> dict[int, Row]:
    """By question; of one that was run twice, the last."""
    found = (row for row in rows if (row["arm"], row.get("policy"), row.get("tokens")) == (kind, policy, tokens))
    return {row["sample"]: row for row in found if "right" in row}


def lengths(rows: Sequence[Row]) -> list[int]:
    return sorted({row["tokens"] for row in rows if "right" in row})


def arms_table(rows: Sequence[Row]) -> str:
    """A line for each length and arm that answered a question."""
    return markdown_table(_HEAD, _lines(rows))


def _lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    arms = dict.fromkeys((row["arm"], row["policy"]) for row in rows if "right" in row)
    for tokens in lengths(rows):
        for kind, policy in sorted(arms, key=lambda arm: list(ARMS).index(arm[0])):
            found = list(_answered(rows, kind, tokens, policy).values())
            if found:
                yield [f"{tokens:,}", _name(kind, policy), _share(found), *_cost(found)]


def _name(kind: str, policy: str) -> str:
    return f"{ARMS[kind]}, `{policy}`" if kind == "recursive" else ARMS[kind]


def _share(found: Sequence[Row]) -> str:
    right = sum(bool(row["right"]) for row in found)
    low, high = wilson(right, len(found))
    return f"{right} of {len(found)} ({100 * low:.0f}-{100 * high:.0f} %)"


def _cost(found: Sequence[Row]) -> list[str]:
    """Means of calls, seconds and compression; peaks over all questions."""
    calls, seconds, ratio = (fmean(row[name] for row in found) for name in ("calls", "seconds", "ratio"))
    peaks = [f"{max(row[name] for row in found):,.0f} MB" for name in ("arena_mb", "memory_mb")]
    return [f"{calls:,.0f}", f"{seconds:,.1f}" if seconds < 100 else f"{seconds:,.0f}", *peaks, f"{ratio:.1f}x"]


def gain(rows: Sequence[Row], *tokens: int) -> Estimate | None:
    """How much more often recursion with the full cache is right than a truncated pass, on questions of both at these
    lengths."""
    pairs: list[tuple[float, float]] = []
    for length in tokens:
        mine, theirs = (_answered(rows, kind, length) for kind in ("recursive", "truncated"))
        shared = sorted(mine.keys() & theirs.keys())
        pairs += [(float(mine[sample]["right"]), float(theirs[sample]["right"])) for sample in shared]
    if not pairs:
        return None
    if len(pairs) == 1:  # which tells nothing about others
        return Estimate(pairs[0][0] - pairs[0][1], -1, 1, 1)
    return paired_difference(*zip(*pairs, strict=True))


def crossover(rows: Sequence[Row]) -> tuple[int, Estimate] | None:
    """The least length from which on recursion is right more often than a truncated pass at every length measured, and
    its gain over all of them: by an interval that excludes zero, of four questions at least."""
    least, longer = None, []
    for tokens in reversed(lengths(rows)):
        here = gain(rows, tokens)
        if here is None:
            continue
        if here.mean <= 0:
            break
        longer.append(tokens)
        found = gain(rows, *longer)
        if found is not None and found.low > 0 and found.num_samples >= _MIN_SAMPLES:
            least = tokens, found
    return least


def crossover_told(rows: Sequence[Row]) -> str:
    gains = [(tokens, found) for tokens in lengths(rows) if (found := gain(rows, tokens)) is not None]
    if not gains:
        return ""
    least = crossover(rows)
    by_length = "; ".join(f"{tokens:,}: {_points(found)}, n {found.num_samples}" for tokens, found in gains)
    told = (
        "No length is shown from which on recursion is right more often than one truncated pass"
        if least is None
        else f"From {least[0]:,} tokens on, recursion is right more often than one truncated pass: {_points(least[1])} "
        f"points over {least[1].num_samples} questions"
    )
    return f"{told} (paired 95 % bootstrap intervals; by tokens: {by_length})."


def _points(found: Estimate) -> str:
    return f"{100 * found.mean:+.0f} [{100 * found.low:+.0f}, {100 * found.high:+.0f}]"


def sharing_told(rows: Sequence[Row]) -> str:
    told = [
        f"{row['calls']} calls with parts of {row['part']:,} tokens took {row['shared_s']:.2f} s as forks in batches "
        f"and {row['sequential_s']:.2f} s one by one with nothing shared ({row['factor']:.1f}x)"
        for row in rows
        if row["arm"] == "sharing"
    ]
    return f"{'; '.join(told)}." if told else ""


def summary(rows: Sequence[Row]) -> str:
    """Of one run."""
    table = arms_table(rows) if lengths(rows) else ""
    return "\n\n".join(part for part in (table, crossover_told(rows), sharing_told(rows)) if part)


def about(row: Row) -> str:
    return (
        f"{row['model']} (window {row['window']:,}), {row['device']}, parts of {row['chunk']:,} tokens, "
        f"{row.get('prompts', 'plain')} prompts, {row['memory']} for KV caches, commit {row['commit']}, {row['date']}:"
    )


def body(rows: Sequence[Row]) -> str:
    """Empty while no rows are kept."""
    return "\n\n".join(f"{about(run[0])}\n\n{summary(run)}" for run in last_runs(rows) if lengths(run))


def main(arguments: Sequence[str]) -> None:
    argument_parser("recurse_page", __doc__).parse_args(arguments)
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), BEGIN, END, body(kept())), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
