"""Rows and cells to read in a test."""

from __future__ import annotations

from typing import Any

from kvfold.bench.rows import Cell, Facts, Row

FACTS = Facts("tiny", 900, 0, "own prose", "float32", "a CPU", "abc1234", "torch 2", "2030-01-01")


def row(prompt: int, task: str = "single", **change: Any) -> Row:
    """A right answer of snapkv at 4x, a quarter of the bytes, unless told otherwise."""
    values: dict[str, Any] = {"policy": "snapkv", "size": "4x", "mode": "known", "expected": ("1234567",)}
    values |= {"answer": "1234567", "score": 1.0, "bytes": 25, "full_bytes": 100, "slots": 12.5, **change}
    return Row(FACTS, prompt, task, **values)


def cell(policy: str, size: str, mode: str, task: str, scores: tuple[float, ...], **change: Any) -> Cell:
    values: dict[str, Any] = {"bytes_ratio": 0.25, "slots": 12.5, **change}
    return Cell(FACTS, policy, size, mode, task, scores, **values)  # type: ignore[arg-type]
