"""Tidy result rows: what was measured, on what, at which commit; tables and plots of them."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from kvfold.bench.environment import commit, cpu_name
from kvfold.errors import InputError, MissingExtra

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

Row = dict[str, Any]


def facts(**more: object) -> Row:
    """Commit, device and versions of this run; KVFOLD_RUN names it where several commands are parts of one."""
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()} CPU"
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        **({} if on_gpu else {"processor": cpu_name()}),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **({"run": os.environ["KVFOLD_RUN"]} if "KVFOLD_RUN" in os.environ else {}),
        **more,
    }


def append_row(name: str, row: Row) -> None:
    """Append one JSON line to benchmarks/results/<name>.jsonl."""
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        raise InputError(f"{path} does not exist; run the benchmark that saves it first")
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def newest(rows: Iterable[Row], *keys: str) -> list[Row]:
    """Of rows that agree in these columns the last one, in the order of the first."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        found[tuple(row.get(key) for key in keys)] = row
    return list(found.values())


def origin(rows: Iterable[Row]) -> str:
    """Where the rows of a table come from, for its caption: device, threads of a CPU, commit and date."""
    return "; ".join(dict.fromkeys(map(_origin, rows)))


def _origin(row: Row) -> str:
    threads = f", {row['threads']} thread{'s' * (row['threads'] != 1)}" if row["device"].endswith("CPU") else ""
    processor = f" ({row['processor']})" if "processor" in row else ""
    return f"{row['device']}{processor}{threads}, commit {row['commit']}, {row['date']}"


def report(name: str, rows: Iterable[Row], *, save: bool, **about: object) -> None:
    """Print rows for people as they come and a last line of JSON.

    With `save`, each is appended to benchmarks/results/<name>.jsonl at once: what comes later may fail.
    """
    known, shown = facts(**about), []
    for row in rows:
        print("  ".join(_shown(key, value) for key, value in row.items()), flush=True)
        shown.append(row)
        if save:
            append_row(name, {**row, **known})
    print(json.dumps({"rows": shown, **known}))


def _shown(key: str, value: object) -> str:
    return f"{key} {value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else f"{key} {value}"


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def svg_pyplot() -> Any:
    """matplotlib.pyplot, set up so that the same rows draw the same file."""
    try:
        import matplotlib
    except ImportError:
        raise MissingExtra("plots need matplotlib; install it with: pip install 'kvfold[bench]'") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvfold"
    from matplotlib import pyplot

    return pyplot


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]
