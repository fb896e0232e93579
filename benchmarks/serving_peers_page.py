"""Write the table of docs/serving.md that compares servers, from the rows of benchmarks/results/serving_peers.jsonl.

    python -m benchmarks.serving_peers_page

One table for every model, dtype and processor, of the rows of its last commit. Of rows about the same server and policy
the last one counts. In brackets: the range over rounds, and how many times as fast as vLLM, the median of the rounds.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from benchmarks.commands import argument_parser, run_main
from benchmarks.docs_section import write_section
from benchmarks.rows import RESULTS, ROOT, Row, markdown_table, newest, origin, read_rows

PAGE = ROOT / "docs" / "serving.md"
KEPT = RESULTS / "serving_peers.jsonl"
BEGIN = "<!-- servers side by side: begin; written by `python -m benchmarks.serving_peers_page` -->"
END = "<!-- servers side by side: end -->"
_ABOUT = ("model", "dtype", "device", "processor", "threads", "tokens", "burst", "replies", "decode")


def body(rows: Sequence[Row]) -> str:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in newest(rows, *_ABOUT, "server", "policy"):
        groups.setdefault(tuple(row.get(name) for name in _ABOUT), []).append(row)
    return "\n\n".join(
        table([row for row in group if row["commit"] == group[-1]["commit"]]) for group in groups.values()
    )


def table(rows: Sequence[Row]) -> str:
    first, peer = rows[0], next((row for row in rows if row["server"].startswith("vllm ")), None)
    rounds = "one round" if first["rounds"] == 1 else f"medians of {first['rounds']} rounds"
    if peer is not None:
        rounds += " (times as fast as vLLM)"
    about = f"{first['model']} in {first['dtype']}, {rounds}, {origin(rows)}"
    columns = {
        "cold_s": (f"cold, {first['tokens']:,} tokens", "s"),
        "hit_s": ("prefix hit", "s"),
        "burst_per_s": (f"{first['burst']} at once on a new document", "requests/s"),
        "decode_per_s": (f"{first['replies']} replies at once", "tokens/s"),
        "single_per_s": ("one reply", "tokens/s"),
    }
    columns = {name: column for name, column in columns.items() if all(name in row for row in rows)}
    head = ["server", *(title for title, _ in columns.values())]
    lines = [
        [
            row["server"] + (f", `{row['policy']}`" if row["policy"] else ""),
            *(_shown(row, peer, name, unit) for name, (_, unit) in columns.items()),
        ]
        for row in rows
    ]
    return f"{about}:\n\n{markdown_table(head, lines)}"


def _shown(row: Row, peer: Row | None, name: str, unit: str) -> str:
    """The median, the range of several rounds, and how many times as fast as the peer it is in the same round."""
    digits = 1 if unit == "tokens/s" else 2
    mine, notes = row[f"{name}_all"], []
    if len(mine) > 1:
        notes.append(f"{min(mine):.{digits}f} to {max(mine):.{digits}f}")
    if peer is not None and peer is not row:
        pairs = zip(mine, peer[f"{name}_all"], strict=True)
        notes.append(f"{statistics.median(b / a if unit == 's' else a / b for a, b in pairs):.2f}x")
    return f"{row[name]:.{digits}f} {unit}" + (f" ({', '.join(notes)})" if notes else "")


def main(arguments: Sequence[str]) -> None:
    argument_parser("serving_peers_page", __doc__).parse_args(arguments)
    write_section(PAGE, BEGIN, END, body(read_rows(KEPT)))


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
