"""Files are replaced whole, or stay as they were."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvfold.atomic_io import read_tensors, replacing, write_whole
from kvfold.errors import FileError


def test_a_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text("old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Also of two containers, in which both may be process 1."""
    path = tmp_path / "found.json"
    with replacing(path) as first:
        first.write_text("first")
        with replacing(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_what_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "found.json"
    with pytest.raises(FileError, match=r"cannot be written .*choose another place"), replacing(path) as temporary:
        temporary.write_text("new")


def test_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="is a device or a pipe, which a rename would replace; name a file"):
        write_whole(tmp_path / "pipe", "text")
    assert (tmp_path / "pipe").is_fifo()


def test_a_pipe_or_folder_of_tensors_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="it is no file but a folder, a device or a pipe"):
            read_tensors(path, "any")


def test_a_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    write_whole(tmp_path / "facts", "text", private=True)
    assert (tmp_path / "facts").stat().st_mode & 0o777 == 0o600
