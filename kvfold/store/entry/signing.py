"""The secret that signs entries: digests are keyed with it (blake2b), so entries cannot be forged without it.

It is read from a file or the environment, never from the command line, which other users of a machine can read.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kvfold.errors import FileError, InputError

VARIABLE = "KVFOLD_STORE_SECRET"
_MIN_BYTES = 16
_MAX_BYTES = 64  # the longest key of blake2b


def read_secret(path: str | Path | None) -> bytes:
    """From a file, else the variable, else empty; trailing white space is stripped."""
    if path is None:
        text = os.environ.get(VARIABLE)
        return b"" if text is None else _checked(text.encode(), VARIABLE)
    try:
        with open(path, "rb") as file:
            return _checked(file.read(1 << 10), str(path))
    except OSError as error:
        raise FileError(f"the secret in {path} cannot be read ({error}); name a file that holds it") from error


def _checked(data: bytes, place: str) -> bytes:
    secret = data.rstrip()
    _check_length(len(secret), f"the secret in {place}")
    return secret


def check_secret(secret: bytes) -> None:
    """InputError unless it is empty or of valid length."""
    if secret:
        _check_length(len(secret), "the secret")


def _check_length(num_bytes: int, name: str) -> None:
    if not _MIN_BYTES <= num_bytes <= _MAX_BYTES:
        hint = "random ones, such as those of `openssl rand -hex 32`"
        raise InputError(f"{name} has {num_bytes} bytes; give {_MIN_BYTES} to {_MAX_BYTES} {hint}")


def signer_of(secret: bytes) -> str:
    """Public identifier of a secret; empty without one."""
    return hashlib.blake2b(b"kvfold signer", digest_size=16, key=secret).hexdigest() if secret else ""
