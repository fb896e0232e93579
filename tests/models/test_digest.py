"""Digests of weights: real sha256, remembered by size and mtime, different for different weights."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvfold.errors import ModelError
from kvfold.models.digest import CACHE_NAME, weights_digest


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
