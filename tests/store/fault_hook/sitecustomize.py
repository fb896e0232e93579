"""Every Python process of the fault suite runs this at its start (PYTHONPATH): it stops writers between an entry's
temporary file and its rename.

In the folder KVFOLD_FAULTS a file `kill` kills the next writer there, with half of its entry written; a folder `meet`
lets writers wait there for one of another process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_MEET_S = 60.0


def stop_writers(folder: Path) -> None:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and ".kvp." in str(args[0]):
            _kill(folder / "kill", Path(args[0]))
            _meet(folder / "meet")

    sys.addaudithook(hook)


def _kill(trigger: Path, temporary: Path) -> None:
    with suppress(FileNotFoundError):
        trigger.unlink()
        os.truncate(temporary, temporary.stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)


def _meet(place: Path) -> None:
    if not place.is_dir():
        return
    (place / str(os.getpid())).touch()
    until = time.monotonic() + _MEET_S
    while len(list(place.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.01)


if found := os.environ.get("KVFOLD_FAULTS"):
    stop_writers(Path(found))
