"""Digests of weights: real sha256, remembered by size and mtime, different for different weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from kvfold.errors import ModelError
from kvfold.models.digest import CACHE_NAME, parameters_digest, values_digest, weights_digest
from tests import tiny


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_one_file_has_its_own_hash(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert weights_digest(tmp_path) == sha(b"weights")


def test_several_files_are_bound_by_name_and_content(tmp_path: Path) -> None:
    for name, content in (("b.safetensors", b"2"), ("a.safetensors", b"1")):
        (tmp_path / name).write_bytes(content)
    lines = f"a.safetensors {sha(b'1')}\nb.safetensors {sha(b'2')}\n"
    assert weights_digest(tmp_path) == sha(lines.encode())


def test_the_hash_is_remembered_while_size_and_mtime_stay(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    stat = file.stat()
    before = weights_digest(tmp_path)
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights_digest(tmp_path) == before
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert weights_digest(tmp_path) == sha(b"WEIGHTS")


@pytest.mark.parametrize(
    "cache", ["", "[]", "{}", '{"model.safetensors": 1}', '{"model.safetensors": {"sha256": "0"}}']
)
def test_a_broken_cache_is_written_anew(tmp_path: Path, cache: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / CACHE_NAME).write_text(cache)
    assert weights_digest(tmp_path) == sha(b"weights")
    assert sha(b"weights") in (tmp_path / CACHE_NAME).read_text()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        weights_digest(tmp_path)


def test_every_single_value_counts() -> None:
    hf = tiny.build("llama")
    known = {values_digest(hf)}
    tensors = [*hf.parameters(), *hf.buffers()]
    for tensor in tensors:
        flat = tensor.detach().view(-1)
        at = int(torch.randint(flat.numel(), ()))
        before = flat[at].item()
        flat[at] += 1.0
        known.add(values_digest(hf))
        flat[at] = before
    assert len(known) == len(tensors) + 1
    assert values_digest(hf) in known and values_digest(tiny.build("llama")) in known


def test_a_value_between_samples_is_seen() -> None:
    """Of a large tensor the digest that samples sees some values, the other one all."""
    hf = nn.Linear(1024, 256, bias=False)
    sampled, whole = parameters_digest(hf), values_digest(hf)
    hf.weight.data[0, 1] += 1.0
    assert parameters_digest(hf) == sampled
    assert values_digest(hf) != whole


def test_the_dtype_counts() -> None:
    assert len({values_digest(tiny.build("llama").to(dtype)) for dtype in (torch.float32, torch.bfloat16)}) == 2
