"""Where kvfold keeps models, and the lock that lets one process at a time write one of them.

<home>/models/<name>/            a finished checkpoint, with kvfold.json
<home>/models/.<name>.partial/   what a pull has so far: verified parts survive a kill
<home>/models/.<name>.lock       flock; the system drops it when its process dies, so it is never stale
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfold.errors import ModelError
from kvfold.models.pull.progress import Report

try:
    import fcntl
except ImportError:  # Windows: pulls of one model are not kept apart there
    fcntl = None  # type: ignore[assignment]


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
    """Hold the model's lock; wait, and say so, while another process has it."""
    path = model_folder(f".{name}.lock", home)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise ModelError(
            f"cannot write to {path.parent} ({error.strerror}); set KVFOLD_HOME to a folder you own"
        ) from error
    with file:
        if fcntl is not None:
            _wait_for_lock(file.fileno(), name, report)
        yield


def _wait_for_lock(descriptor: int, name: str, report: Report) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        label = f"wait for another process that pulls {name}"
        report(label, 0, None)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        report(label, 1, 1)
