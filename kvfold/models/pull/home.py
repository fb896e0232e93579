"""Model folders under KVFOLD_HOME, and the file lock that lets one process at a time pull a model.

<home>/models/<name>/            a finished checkpoint, with kvfold.json
<home>/models/.<name>.partial/   an unfinished pull: verified parts are kept after a kill
<home>/models/.<name>.lock       released by the kernel when its process dies, so it is never stale
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kvfold.errors import ModelError
from kvfold.models.pull.progress import Report

HOME_HELP = (
    "Models are kept under KVFOLD_HOME (default: ~/.cache/kvfold, or kvfold under XDG_CACHE_HOME; macOS: "
    "~/Library/Caches/kvfold; Windows: kvfold under LOCALAPPDATA)."
)


def home_folder() -> Path:
    """KVFOLD_HOME, or kvfold in the platform's cache folder."""
    if chosen := os.environ.get("KVFOLD_HOME"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "kvfold"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "kvfold"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvfold"


def model_folder(name: str, home: Path | None = None) -> Path:
    return (home or home_folder()).absolute() / "models" / name


def partial_folder(name: str, home: Path | None = None) -> Path:
    return model_folder(f".{name}.partial", home)


@contextmanager
def locked(name: str, home: Path | None, report: Report) -> Iterator[None]:
    """Hold the model's lock; wait, and report that, while another process has it."""
    path = model_folder(f".{name}.lock", home)
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        label = f"wait for another process that pulls {name}"
        report(label, 0, None)
        lock.acquire()
        report(label, 1, 1)
    except OSError as error:
        raise ModelError(
            f"cannot write to {path.parent} ({error.strerror}); set KVFOLD_HOME to a folder you own"
        ) from error
    try:
        yield
    finally:
        lock.release()
