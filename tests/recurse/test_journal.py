"""The journal: replies survive, a torn line is cut off, and nothing else in the file is believed."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest

from kvfold.errors import FileError, InputError
from kvfold.recurse.journal import Journal, Recorded, digest, remove_old

FIRST, SECOND = ("a", Recorded("4410", 12, is_cut=True)), ("b", Recorded('nothing "here"\n', 9))


def _written(path: Path) -> bytes:
    with Journal.open(path, "run") as journal:
        journal.add([FIRST, SECOND])
    return path.read_bytes()


def test_replies_are_there_again(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "journal"
    _written(path)
    with Journal.open(path, "run") as journal:
        assert (len(journal), journal.get("a"), journal.get("b"), journal.get("c")) == (2, FIRST[1], SECOND[1], None)
        journal.add([("c", Recorded("x", 1))])
    with Journal.open(path, "run") as journal:
        assert len(journal) == 3


def test_a_kill_at_any_byte_leaves_a_journal_that_goes_on(tmp_path: Path) -> None:
    whole = _written(tmp_path / "whole")
    for length in range(len(whole) + 1):
        path = tmp_path / "torn"
        path.write_bytes(whole[:length])
        with Journal.open(path, "run") as journal:
            assert len(journal) == max(0, whole[:length].count(b"\n") - 1)
            journal.add([("c", Recorded("new", 1))])
        with Journal.open(path, "run") as journal:
            assert journal.get("c") == Recorded("new", 1)


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    _written(tmp_path / "journal")
    with pytest.raises(FileError, match="is no journal of this text, question, model and options; name another file"):
        Journal.open(tmp_path / "journal", "other")


_DAMAGE = (
    "[]",
    "not json",
    "{}",
    '{"call": 1, "reply": "x", "num_tokens": 1}',
    '{"call": "a", "reply": [], "num_tokens": 1}',
    '{"call": "a", "reply": "x", "num_tokens": -1}',
    '{"call": "a", "reply": "x", "num_tokens": 1, "is_cut": "no"}',
    "[" * 100_000,
)


@pytest.mark.parametrize("line", _DAMAGE, ids=range(len(_DAMAGE)))
def test_damage_is_told_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "journal"
    path.write_bytes(_written(path) + line.encode() + b"\n")
    with pytest.raises(FileError, match=r"line 4 of .*journal is damaged; remove the file"):
        Journal.open(path, "run")


def test_a_folder_and_a_place_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="is a folder; name a file for the journal"):
        Journal.open(tmp_path, "run")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be used as a journal"):
        Journal.open(tmp_path / "file" / "journal", "run")


def test_two_processes_do_not_share_a_journal(tmp_path: Path) -> None:
    with (
        Journal.open(tmp_path / "journal", "run"),
        pytest.raises(InputError, match="another process is reading the same text"),
    ):
        Journal.open(tmp_path / "journal", "run")


def test_a_complete_reading_removes_its_journal(tmp_path: Path) -> None:
    Journal.open(tmp_path / "journal", "run").remove()
    assert not (tmp_path / "journal").exists()


def test_lines_are_plain_json(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in _written(tmp_path / "journal").splitlines()]
    assert rows[1] == {"call": "a", "reply": "4410", "num_tokens": 12, "is_cut": True}


def test_a_digest_depends_on_every_part_and_not_on_their_order() -> None:
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


@pytest.mark.parametrize("content", ["One line without an end", "Two\nlines", "{", "[]\n", '{"format": "other"}\n'])
def test_a_file_that_is_no_journal_stays_as_it_is(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content, encoding="utf-8")
    if content == "{":  # so may a journal begin whose process was killed
        Journal.open(path, "run").close()
        return
    with pytest.raises(FileError, match="is no journal of kvfold read; name another file"):
        Journal.open(path, "run")
    assert path.read_text(encoding="utf-8") == content


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="is a device or a pipe; name a file for the journal"):
        Journal.open(tmp_path / "pipe", "run")


def test_a_journal_is_its_owners_alone(tmp_path: Path) -> None:
    _written(tmp_path / "journal")
    assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path: Path) -> None:
    before = _written(tmp_path / "journal")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal.open(tmp_path / "journal", "run") as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        try:
            with pytest.raises(FileError, match=r"cannot be written .*; make room, or name another"):
                journal.add([("c", Recorded("x" * 100, 1))])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / "journal").read_bytes() == before
        journal.add([("c", Recorded("x", 1))])
    with Journal.open(tmp_path / "journal", "run") as journal:
        assert len(journal) == 3


def test_journals_of_runs_that_were_given_up_are_removed(tmp_path: Path) -> None:
    for name, days in (("old.jsonl", 31), ("new.jsonl", 29), ("notes.txt", 300)):
        _written(tmp_path / name)
        os.utime(tmp_path / name, (0, 1e9 - days * 86_400))
    remove_old(tmp_path, 1e9)
    remove_old(tmp_path / "nowhere", 1e9)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.jsonl", "notes.txt"]
