"""sha256 of files and of a checkpoint's weights.

A saved session holds keys and values of certain weights and means nothing under others, so it is bound to
`weights_digest`. Hashing gigabytes takes seconds; the result is kept beside the weights, keyed by size and mtime.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvfold.errors import ModelError
from kvfold.models.progress import Report, silent

CHUNK_BYTES = 1 << 20
CACHE_NAME = ".kvfold-digests.json"


def file_digest(path: Path, report: Report = silent) -> str:
    """sha256 of one file, streamed."""
    sha = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
            done += len(chunk)
            report(f"hash {path.name}", done, total)
    return sha.hexdigest()


def weights_digest(folder: Path | str) -> str:
    """sha256 of the folder's safetensors: the file's own hash, or, of several, the hash over their names and hashes."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ModelError(f'no *.safetensors in "{folder}"; name the folder of a transformers checkpoint')
    digests = _cached_digests(Path(folder), files)
    if len(digests) == 1:
        return digests[0]
    lines = "".join(f"{file.name} {digest}\n" for file, digest in zip(files, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def _cached_digests(folder: Path, files: list[Path]) -> list[str]:
    cache = _read_cache(folder / CACHE_NAME)
    fresh = {file.name: _record(file, cache.get(file.name)) for file in files}
    if fresh != cache:
        _write_cache(folder / CACHE_NAME, fresh)
    return [str(fresh[file.name]["sha256"]) for file in files]


def _record(file: Path, known: Any) -> dict[str, Any]:
    stat = file.stat()
    key = {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    if isinstance(known, dict) and {**known, **key} == known and isinstance(known.get("sha256"), str):
        return known
    return {**key, "sha256": file_digest(file)}


def _read_cache(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            return content
    return {}


def _write_cache(path: Path, content: dict[str, Any]) -> None:
    with suppress(OSError):  # a read-only folder is hashed anew each time
        path.write_text(json.dumps(content, indent=1) + "\n")
