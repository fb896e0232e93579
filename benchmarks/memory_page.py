"""Write the tables of docs/memory.md from the rows of benchmarks/results/memory.jsonl.

    python -m benchmarks.memory_page

Answers without a model, answers of models, and times of recall. Of rows about the same the last one counts; rows of
fewer than 100 questions are left out, and rows of an older judge.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.commands import run_main
from benchmarks.docs_section import Section
from benchmarks.rows import RESULTS, ROOT, Row, markdown_table, newest, origin, read_rows
from kvfold.memory.evaluation.log import KINDS

KEPT = RESULTS / "memory.jsonl"
_MIN_QUESTIONS = 100
_OLD_JUDGE = ("73c4854",)  # commits where any answer without a value was right to a question that nothing answers
_SYSTEMS = {"memory": "memory", "bm25": "BM25 over the log", "full": "the whole log", "nothing": "nothing"}
_HEAD = ["right, %", *KINDS, "recalled", "tokens", "ms"]


def body(rows: Sequence[Row]) -> str:
    """All tables that there are rows for."""
    asked = [row for row in rows if row.get("questions", 0) >= _MIN_QUESTIONS and row["commit"] not in _OLD_JUDGE]
    plain = newest((row for row in asked if row["model"] is None), "wording", "system", "embedder")
    tables = [
        answers_table([row for row in plain if row["wording"] == wording]) for wording in _values(plain, "wording")
    ]
    answered = newest(
        (row for row in asked if row["model"]), "model", "wording", "system", "policy", "device", "embedder"
    )
    for model in _values(answered, "model"):
        of_model = [row for row in answered if row["model"] == model]
        tables += [
            model_table([row for row in of_model if row["embedder"] == name]) for name in _values(of_model, "embedder")
        ]
    timed = newest((row for row in rows if "recall_ms" in row), "facts", "embedder", "device")
    return "\n\n".join([*tables, *([speed_table(timed)] if timed else [])])


def _values(rows: Sequence[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def answers_table(rows: Sequence[Row]) -> str:
    """What only the memory's vectors change stands once."""
    shown = [row for row in rows if row["system"] == "memory" or row["embedder"] == rows[0]["embedder"]]
    lines = [[_system(row), *_cells(row)] for row in shown if row["accuracy"] is not None]
    title = f"Without a model, {rows[0]['wording']} wording, {rows[0]['logs']} logs, {rows[0]['questions']} questions"
    return f"{title}; {origin(shown)}:\n\n{markdown_table(['system', *_HEAD], lines)}"


def model_table(rows: Sequence[Row]) -> str:
    lines = [[_system(row), f"`{row['policy']}`", *_cells(row)] for row in rows]
    title = f"Answered by {rows[0]['model']}, {rows[0]['logs']} logs, {rows[0]['questions']} questions"
    return f"{title}; {origin(rows)}:\n\n{markdown_table(['system', 'policy', *_HEAD], lines)}"


def _system(row: Row) -> str:
    return f"{_SYSTEMS[row['system']]} (`{row['embedder']}`)" if row["system"] == "memory" else _SYSTEMS[row["system"]]


def _cells(row: Row) -> list[str]:
    shares = [row["accuracy"], *(row[kind] for kind in KINDS), row["recalled"]]
    return [
        *("-" if share is None else f"{100 * share:.1f}" for share in shares),
        f"{row['tokens']:,.0f}",
        _ms(row["ms"]),
    ]


def _ms(value: float) -> str:
    return f"{value:,.1f}"


def speed_table(rows: Sequence[Row]) -> str:
    lines = [
        [
            f"{row['facts']:,}",
            f"`{row['embedder']}`",
            *map(_ms, (row["recall_ms"], row["recall_ms_p80"], row["first_ms"], row["write_ms"])),
            f"{row['file_bytes'] / 1e6:.1f} MB",
        ]
        for row in rows
    ]
    head = ["facts", "vectors", "recall, ms", "p80", "the first of a process", "write of a turn, ms", "file"]
    return f"Times, medians of 50; {origin(rows)}:\n\n{markdown_table(head, lines)}"


SECTION = Section(ROOT / "docs" / "memory.md", "memory", "memory_page", lambda: body(read_rows(KEPT)))


def main(arguments: Sequence[str]) -> None:
    SECTION.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
