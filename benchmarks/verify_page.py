"""Write the tables of docs/verify.md from the rows of benchmarks/results/verify.jsonl.

    python -m benchmarks.verify_page

Two kinds of tables, for every model: running sums with and without checks, and a long chain in bounded memory beside
the full cache. Of rows about the same the last one counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from benchmarks.commands import run_main
from benchmarks.docs_section import Section
from benchmarks.rows import RESULTS, ROOT, Row, markdown_table, newest, origin, read_rows

KEPT = RESULTS / "verify.jsonl"
_ARMS = {
    "none": "no check",
    "resample": '`ArithmeticCheck`, `retry="resample"`',
    "reason": '`ArithmeticCheck`, `retry="reason"`',
}
_MB = 1e6


def body(rows: Sequence[Row]) -> str:
    """All tables, sums before long chains."""
    sums = newest((row for row in rows if row["arm"] != "long"), "model", "policy", "numbers", "largest", "arm")
    chains = newest((row for row in rows if row["arm"] == "long"), "model", "bound_bytes", "policy")
    tables = [sums_table(group) for group in _groups(sums, "model", "policy", "numbers", "largest")]
    tables += [long_table(group) for group in _groups(chains, "model", "bound_bytes")]
    return "\n\n".join(tables)


def _groups(rows: Iterable[Row], *keys: str) -> list[list[Row]]:
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(found.values())


def sums_table(rows: Sequence[Row]) -> str:
    first = rows[0]
    title = f"Running sums of {first['numbers']} numbers up to {first['largest']}, {first['chains']} chains"
    lines = [
        [
            _ARMS[row["arm"]],
            f"{row['lines_right']:.0%} of {row['lines']}",
            f"{row['chains_right']:.0%}",
            f"{row['retries']}",
            f"{row['failed']}",
            f"{row['generated']:,}",
            f"{row['wasted']:.0%}",
        ]
        for row in rows
    ]
    head = [
        "check",
        "lines right",
        "chains right",
        "retries",
        "lines that never passed",
        "tokens generated",
        "cropped and notes",
    ]
    return f"{title}; {first['model']}, policy `{first['policy']}`, {origin(rows)}:\n\n{markdown_table(head, lines)}"


def long_table(rows: Sequence[Row]) -> str:
    first = rows[0]
    title = f"One chain of {first['tokens']:,} tokens, bound {first['bound_bytes'] / _MB:,.1f} MB"
    lines = [
        [
            f"`{row['policy']}`",
            f"{row['peak_bytes'] / _MB:,.1f} MB",
            f"{row['peak_bytes'] / row['bound_bytes']:.0%}",
            f"{row['held_bytes'] / _MB:,.1f} MB",
            f"{row['lines_right']:.0%} of {row['steps']}",
            f"{row['retries']}",
            f"{row['wasted']:.0%}",
            f"{row['seconds']:,.0f} s",
        ]
        for row in rows
    ]
    head = ["policy", "peak of the arena", "of the bound", "held", "lines right", "retries", "cropped", "time"]
    return f"{title}; {first['model']}, {origin(rows)}:\n\n{markdown_table(head, lines)}"


SECTION = Section(ROOT / "docs" / "verify.md", "checked steps", "verify_page", lambda: body(read_rows(KEPT)))


def main(arguments: Sequence[str]) -> None:
    SECTION.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
