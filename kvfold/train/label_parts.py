"""Labels of a run that is not over: a folder with a file for each batch, so that a killed run goes on where it was.

A part is written whole or not at all. It names the run (a digest of texts, model, policy and options), and its rows are
checked as those of a file are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file

from kvfold.atomic_io import TEMPORARY, read_tensors, replacing
from kvfold.errors import FileError, InputError
from kvfold.train.label_rows import Rows, rows_of, tensors_of

_FORMAT = "kvfold-labels-part-1"


class LabelParts:
    """The parts of one run, in order and without a gap; without a folder they are kept in memory."""

    def __init__(self, folder: Path | None, key: str) -> None:
        self.folder, self._key = folder, key
        self.found: list[Rows] = []
        if folder is not None:
            try:
                folder.mkdir(exist_ok=True)
                self._lock = FileLock(folder / ".lock", timeout=0)
                self._lock.acquire()
            except Timeout:
                raise InputError(
                    f"another process writes labels to {folder}; wait for it, or name another file to write"
                ) from None
            except OSError as error:
                raise FileError(f"{folder} cannot be made ({error.strerror}); choose another place") from None

    def load(self, position_N: Sequence[int], topk: int, vocab_size: int) -> int:
        """Read what an earlier run has done; returns how many rows, the first of those at these positions."""
        expected_N, done = torch.tensor(position_N), 0
        for path in [] if self.folder is None else sorted(self.folder.glob("*.safetensors")):
            try:
                header, tensors = read_tensors(path, _FORMAT)
                if header["run"] != self._key:
                    raise FileError(
                        f"{self.folder} holds labels of other texts, another model, policy or options; remove the "
                        "folder, or name another file to write"
                    )
                rows = rows_of(tensors, topk, vocab_size, int(expected_N[-1]) + 1)
            except (SafetensorError, OSError, LookupError, ValueError, TypeError, RecursionError, RuntimeError):
                raise FileError(f"{path} is damaged; remove the folder {self.folder} to label anew") from None
            if not rows.position_N.equal(expected_N[done : done + len(rows.position_N)]):
                raise FileError(f"{path} does not follow the parts before it; remove the folder {self.folder}")
            self.found.append(rows)
            done += len(rows.position_N)
        return done

    def add(self, rows: Rows) -> None:
        if self.folder is not None:
            header = json.dumps({"format": _FORMAT, "run": self._key})
            with replacing(self.folder / f"{len(self.found):08d}.safetensors") as temporary:
                save_file(tensors_of(rows), temporary, metadata={"kvfold": header})
        self.found.append(rows)

    def remove(self) -> None:
        """Delete the folder: the labels are written."""
        if self.folder is None:
            return
        for path in (*self.folder.glob("*.safetensors"), *self.folder.glob(f".*{TEMPORARY}")):
            path.unlink(missing_ok=True)
        Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()
        with suppress(OSError):  # somebody else's files stay
            self.folder.rmdir()
