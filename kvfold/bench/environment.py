"""The environment of a run: commit, package versions, device."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("kvfold", "torch", "transformers", "triton")
_CPUINFO = Path("/proc/cpuinfo")
_EXTENSIONS = {"avx512f": "AVX-512", "amx_tile": "AMX"}  # that virtual machines show, whatever they call the processor


def commit() -> str:
    """The short commit of the source tree, with + if it was changed. KVFOLD_COMMIT names it in a copy without git."""
    if "KVFOLD_COMMIT" in os.environ:
        return os.environ["KVFOLD_COMMIT"]
    head = _git("rev-parse", "--short", "HEAD")
    return "unknown" if head is None else head + ("+" if _git("status", "--porcelain", "-uno") else "")


def _git(*arguments: str) -> str | None:
    try:
        folder = Path(__file__).resolve().parents[2]
        found = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """Of Python and packages; one that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@cache
def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """The processor, with the extensions that matter for speed; the architecture where the system does not name it."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine()
    flags = facts.get("flags", "").split()
    return ", ".join([name, *(label for flag, label in _EXTENSIONS.items() if flag in flags)])


def now() -> str:
    """UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
