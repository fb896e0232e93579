"""sha256 of files and of a checkpoint's weights.

A saved KV cache is valid only for the weights that made it, so it is bound to `weights_digest`. Hashing gigabytes takes
seconds; the result is kept beside the weights, keyed by size and mtime. A module in memory has two digests: of a sample
of its weights, which is fast and independent of the dtype, and of every value.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.errors import ModelError
from kvfold.models.pull.progress import Report, silent
from kvfold.yielding import unpatched

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 1 << 20
CACHE_NAME = ".kvfold-digests.json"
_SHOWN_BYTES = 32 << 20  # smaller files are not reported


def file_digest(path: Path, report: Report = silent) -> str:
    """sha256 of one file, streamed."""
    sha = hashlib.sha256()
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            sha.update(chunk)
            done += len(chunk)
            if total >= _SHOWN_BYTES:
                report(f"hash {path.name}", done, total)
    return sha.hexdigest()


def weights_digest(folder: Path | str, report: Report = silent, suffixes: tuple[str, ...] = (".safetensors",)) -> str:
    """sha256 of the folder's safetensors: the file's own, or, of several, that of their names and hashes."""
    files = sorted(file for file in Path(folder).glob("*.*") if file.suffix in suffixes)
    if not files:
        raise ModelError(f'no *.safetensors in "{folder}"; name the folder of a transformers checkpoint')
    digests = [_remembered_digest(file, report) for file in files]
    if len(digests) == 1:
        return digests[0]
    lines = "".join(f"{file.name} {digest}\n" for file, digest in zip(files, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def parameters_digest(hf: Any) -> str:
    """sha256 over every parameter's name, shape and an even sample of up to 65,536 of its values, as fp32: the same in
    every dtype that holds the weights exactly, and within a pass, whose layers are replaced."""
    sha = hashlib.sha256()
    with unpatched():
        parameters = sorted(hf.named_parameters())
    for name, parameter in parameters:
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 65536)].float().cpu().contiguous()
        sha.update(f"{name}{tuple(parameter.shape)}".encode())
        sha.update(sample.numpy().tobytes())
    return sha.hexdigest()


def values_digest(hf: Any) -> str:
    """Over every value of every parameter and buffer as it lies in memory, with names, dtypes and shapes; each core
    hashes a tensor at a time, by blake2b: processors without instructions for sha256 are twice as fast with it."""
    with unpatched():
        tensors = sorted(chain(hf.named_parameters(), hf.named_buffers()), key=itemgetter(0))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return hashlib.sha256("".join(threads.map(_value_line, tensors)).encode()).hexdigest()


def _value_line(named: tuple[str, Tensor]) -> str:
    import torch  # here: commands that hash files alone come without it

    name, tensor = named
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {hashlib.blake2b(content).hexdigest()}\n"


def cached_digest(path: Path, report: Report = silent) -> str:
    """sha256 of one file, taken from the folder's cache where size and mtime are still those of the cached one."""
    known = _read_cache(path.parent).get(path.name)
    if isinstance(known, dict) and known == {**_key(path), "sha256": known.get("sha256")}:
        return str(known["sha256"])
    return file_digest(path, report)


def _remembered_digest(path: Path, report: Report) -> str:
    record = {**_key(path), "sha256": cached_digest(path, report)}
    cache = _read_cache(path.parent)
    if cache.get(path.name) != record:
        with suppress(OSError):  # a read-only folder is hashed anew each time
            (path.parent / CACHE_NAME).write_text(json.dumps({**cache, path.name: record}, indent=1) + "\n")
    return str(record["sha256"])


def _key(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _read_cache(folder: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads((folder / CACHE_NAME).read_text())
        if isinstance(content, dict):
            return content
    return {}
