"""Reading rows: lists and lines, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold.bench.workloads.files import read_rows, want
from kvfold.errors import InputError


def test_a_list_and_lines_are_the_same_rows(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text('[{"a": 1},\n {"a": "x\u2028y"}]', encoding="utf-8")
    (tmp_path / "lines.jsonl").write_text('{"a": 1}\n\n{"a": "x\u2028y"}\n', encoding="utf-8")
    assert read_rows(tmp_path / "list.json") == read_rows(tmp_path / "lines.jsonl") == ({"a": 1}, {"a": "x\u2028y"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no rows"),
        (b"[]", "holds no rows"),
        (b"[1, 2]", "holds no rows"),
        (b'{"a": 1}\n{"a": ', "neither a JSON list nor one JSON object a line"),
        (b"\xff\xfe", "neither a JSON list nor one JSON object a line"),
    ],
)
def test_what_holds_no_rows_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_rows(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere\.json cannot be read: No such file"):
        read_rows(tmp_path / "nowhere.json")


def test_a_row_is_refused_by_the_key_it_lacks() -> None:
    want({"a": 1, "b": 2}, "a", "b", where="here")
    with pytest.raises(InputError, match='a row of here has no "c"; it has a, b'):
        want({"b": 1, "a": 2}, "a", "c", where="here")
