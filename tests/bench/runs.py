"""Small runs of the benchmark on a tiny random model, whose answers are nonsense but reproducible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvfold.bench.configure import BenchConfig
from kvfold.bench.record import Row, read_run
from kvfold.bench.suite import Bench
from kvfold.models.loader import Model

SMALL = "protect(sinks=2, recent=4)"
SIZED = (f"keydiff + {SMALL}", f"snapkv(window=8) + ada + int4 + {SMALL}")


def wanted(**change: Any) -> BenchConfig:
    """Two tasks, two policies that evict and one that does not, in two memories; int4 is too large for one."""
    values: dict[str, Any] = {
        "workloads": ("passkey", "chat:requests"),
        "policies": (*SIZED, "int4"),
        "memories": ("100%", "45%"),
        "lengths": (800,),
        "samples": 2,
        "fidelity": 1,
        "diagnostics": 1,
    }
    return BenchConfig(**values | change)


def bench(model: Model, folder: Path, **change: Any) -> Bench:
    asked = wanted(**change)
    return Bench(model, asked.describe(model, "kvfold bench"), asked.tasks, folder, asked.filler[0])


def rows(folder: Path) -> list[Row]:
    """Without what a clock says, in the order of their keys."""
    return sorted((row.untimed for row in read_run(folder).rows), key=lambda row: row.key)
