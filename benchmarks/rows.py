"""Tidy result rows: what was measured, on what, at which commit."""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import torch
import transformers

from kvfold.bench.environment import commit

_ROOT = Path(__file__).resolve().parents[1]
RESULTS = _ROOT / "benchmarks" / "results"


def facts(**more: object) -> dict[str, object]:
    """Commit, device and versions of this run; KVFOLD_RUN names it where several scripts are parts of one."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} CPU"
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **({"run": os.environ["KVFOLD_RUN"]} if "KVFOLD_RUN" in os.environ else {}),
        **more,
    }


def append_row(name: str, row: dict[str, object]) -> None:
    """Append one JSON line to benchmarks/results/<name>.jsonl."""
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def percentile(values: list[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * (len(ordered) - 1)))]
