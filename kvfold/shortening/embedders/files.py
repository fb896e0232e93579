"""Files of an embedder's folder: read whole, named in errors, and told apart by a digest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvfold.errors import ModelError


def read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        raise ModelError(
            f"{folder / name} cannot be read ({error.strerror}); copy or pull the embedder anew"
        ) from error


def read_json(folder: Path, name: str, otherwise: Any) -> Any:
    """The content of a JSON file, which is a value of the type of `otherwise`; that value where there is no file."""
    if not (folder / name).is_file():
        return otherwise
    try:
        found = json.loads(read(folder, name))
    except ValueError as error:
        raise ModelError(f"{folder / name} is damaged ({error}); copy or pull the embedder anew") from error
    if not isinstance(found, type(otherwise)):
        raise ModelError(f"{folder / name} is damaged (no {type(otherwise).__name__}); copy or pull the embedder anew")
    return found


def digest_of(method: str, *contents: bytes) -> str:
    """16 digits that change with the method and with any file."""
    parts = [method, *(hashlib.sha256(content).hexdigest() for content in contents)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def tokenizer_of(folder: Path, content: bytes) -> Tokenizer:
    """The tokenizer of a tokenizer.json, which neither cuts nor pads."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(f"{folder / 'tokenizer.json'} is damaged ({error}); copy or pull the embedder anew") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
