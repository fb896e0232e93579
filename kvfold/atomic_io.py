"""Atomic file writes (temporary file, fsync, rename), and safetensors files whose header names their format.

A tensor file is safetensors with JSON in its metadata, under "kvfold", that names its format.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from kvfold.errors import FileError

if TYPE_CHECKING:
    from torch import Tensor

TEMPORARY = ".tmp"  # how the name of a file ends that is being written


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write to, synced and renamed at the end; FileError, with nothing left, where that fails."""
    # Random: processes of two containers that share a folder may have the same number.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")
    if path.exists() and not path.is_file() and not path.is_dir():
        raise FileError(f"{path} is a device or a pipe, which a rename would replace; name a file")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise FileError(f"{path} cannot be written ({error}); choose another place") from error
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Write a text; `private`: readable by its owner alone."""
    with replacing(path) as temporary:
        if private:
            temporary.touch(0o600)
        temporary.write_text(text, encoding="utf-8")


def read_tensors(path: Path, *wanted: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Header and tensors of a file of a `wanted` format; FileError if it has another one.

    A file that is no such thing raises what its parts raise: SafetensorError, OSError, LookupError, ValueError,
    TypeError. Its size is the caller's to check.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise OSError(errno.EINVAL, "it is no file but a folder, a device or a pipe")
    with safe_open(path, framework="pt") as file:
        header: dict[str, Any] = json.loads((file.metadata() or {})["kvfold"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    if header["format"] not in wanted:
        raise FileError(f'{path} has format "{header["format"]}"; this version reads {" and ".join(wanted)}')
    return header, tensors
