"""Write the table of docs/serving.md that compares servers, from the rows of benchmarks/results/serving_peers.jsonl.

    python -m benchmarks.serving_peers_page

One table for every model, dtype and device, of the rows of its last commit. Of rows about the same server and policy
the last one counts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.commands import argument_parser, run_main
from benchmarks.docs_section import write_section
from benchmarks.rows import RESULTS, ROOT, Row, markdown_table, newest, origin, read_rows

PAGE = ROOT / "docs" / "serving.md"
KEPT = RESULTS / "serving_peers.jsonl"
BEGIN = "<!-- servers side by side: begin; written by `python -m benchmarks.serving_peers_page` -->"
END = "<!-- servers side by side: end -->"
_ABOUT = ("model", "dtype", "device", "threads", "tokens", "burst", "replies", "decode")


def body(rows: Sequence[Row]) -> str:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in newest(rows, *_ABOUT, "server", "policy"):
        groups.setdefault(tuple(row[name] for name in _ABOUT), []).append(row)
    return "\n\n".join(
        table([row for row in group if row["commit"] == group[-1]["commit"]]) for group in groups.values()
    )


def table(rows: Sequence[Row]) -> str:
    first = rows[0]
    rounds = "one round" if first["rounds"] == 1 else f"medians of {first['rounds']} rounds (their range)"
    about = f"{first['model']} in {first['dtype']}, {rounds}, {origin(rows)}"
    head = [
        "server",
        f"cold, {first['tokens']:,} tokens",
        "prefix hit",
        f"{first['burst']} at once on a new document",
        f"{first['replies']} replies at once",
    ]
    lines = [
        [
            row["server"] + (f", `{row['policy']}`" if row["policy"] else ""),
            f"{_shown(row, 'cold_s', 2)} s",
            f"{_shown(row, 'hit_s', 2)} s",
            f"{_shown(row, 'burst_per_s', 2)} requests/s",
            f"{_shown(row, 'decode_per_s', 1)} tokens/s",
        ]
        for row in rows
    ]
    return f"{about}:\n\n{markdown_table(head, lines)}"


def _shown(row: Row, name: str, digits: int) -> str:
    """The median, and the range of several rounds."""
    low, high = min(row[f"{name}_all"]), max(row[f"{name}_all"])
    several = f" ({low:.{digits}f} to {high:.{digits}f})" if row["rounds"] > 1 else ""
    return f"{row[name]:.{digits}f}{several}"


def main(arguments: Sequence[str]) -> None:
    argument_parser("serving_peers_page", __doc__).parse_args(arguments)
    write_section(PAGE, BEGIN, END, body(read_rows(KEPT)))


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
