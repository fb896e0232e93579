"""Rows: written whole, read back the same, resumed after any end, condensed without losing a score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.bench.rows import Row, RowFile, condense, read_cells, read_rows, to_json
from kvfold.bench.table import table
from kvfold.errors import InputError
from tests.bench.examples import FACTS, row


def _file(folder: Path, *rows: Row) -> Path:
    path = folder / "rows.jsonl"
    RowFile(path, FACTS).append(rows)
    return path


def test_rows_read_back_the_same(tmp_path: Path) -> None:
    rows = [row(0), row(1, score=None, note="too small"), row(2, "multivalue", expected=("1", "2"), answer="é\n1")]
    assert read_rows(_file(tmp_path, *rows)) == rows


def test_appending_keeps_what_is_there(tmp_path: Path) -> None:
    path = _file(tmp_path, row(0))
    file = RowFile(path, FACTS)
    assert file.done == {row(0).key}
    file.append([row(1)])
    assert file.done == {row(0).key, row(1).key}
    assert read_rows(path) == [row(0), row(1)]


def test_half_a_line_is_dropped_before_going_on(tmp_path: Path) -> None:
    path = _file(tmp_path, row(0), row(1))
    path.write_bytes(path.read_bytes()[:-20])
    assert read_rows(path) == [row(0)]
    file = RowFile(path, FACTS)
    assert file.done == {row(0).key}
    file.append([row(1), row(2)])
    assert read_rows(path) == [row(0), row(1), row(2)]


@pytest.mark.parametrize("change", ({"tokens": 7}, {"seed": 1}, {"model": "other"}, {"haystack": "a text"}))
def test_a_file_does_not_mix_workloads(tmp_path: Path, change: dict[str, int | str]) -> None:
    path = _file(tmp_path, row(0))
    with pytest.raises(InputError, match="name another file"):
        RowFile(path, replace(FACTS, **change))  # type: ignore[arg-type]


def test_a_later_commit_may_go_on(tmp_path: Path) -> None:
    path = _file(tmp_path, row(0))
    later = replace(FACTS, commit="later", date="2031-01-01")
    RowFile(path, later).append([replace(row(1), facts=later)])
    assert [found.facts.commit for found in read_rows(path)] == ["abc1234", "later"]


@pytest.mark.parametrize("line", ("nonsense\n", '{"prompt": 1}\n', '["a list"]\n'))
def test_foreign_lines_are_refused_with_their_number(tmp_path: Path, line: str) -> None:
    path = _file(tmp_path, row(0))
    path.write_text(path.read_text() + line)
    with pytest.raises(InputError, match="line 2"):
        read_rows(path)


def test_missing_file_has_no_rows_and_no_cells(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none") == []
    with pytest.raises(InputError, match="does not exist"):
        read_cells(tmp_path / "none")


def test_condensing_keeps_scores_in_order_of_prompts() -> None:
    rows = [row(6, score=0.5, bytes=30), row(0, score=1.0, bytes=10), row(3, score=0.0, bytes=20)]
    (cell,) = condense(rows)
    assert cell.scores == (1.0, 0.0, 0.5)
    assert cell.bytes_ratio == 0.2  # mean of 10, 20 and 30 of 100
    assert (cell.policy, cell.size, cell.mode, cell.task) == ("snapkv", "4x", "known", "single")


def test_condensing_separates_what_differs() -> None:
    rows = [row(0), row(0, size="8x"), row(0, mode="unknown"), row(0, policy="tova"), row(1, "multikey")]
    assert len(condense(rows)) == len(rows)


def test_rows_that_could_not_run_leave_a_note() -> None:
    (cell,) = condense([row(0, score=None, note="too small"), row(3, score=None, note="too small")])
    assert cell.scores == () and cell.note == "too small"


def test_shards_concatenated_or_side_by_side_are_the_whole_run(tmp_path: Path) -> None:
    rows = [row(i, ("single", "multikey")[i % 2], score=i / 7) for i in range(8)]
    whole, *shards = (tmp_path / name for name in ("whole", "0", "1", "2"))
    RowFile(whole, FACTS).append(rows)
    for index, path in enumerate(shards):
        RowFile(path, FACTS).append(rows[index::3])
    joined = tmp_path / "joined"
    joined.write_bytes(b"".join(path.read_bytes() for path in shards))
    assert read_cells(joined) == read_cells(*shards)
    assert {cell.task: cell for cell in read_cells(*shards)} == {cell.task: cell for cell in read_cells(whole)}
    assert len(read_rows(joined)) == len(rows)


def test_a_shard_given_twice_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path, row(0), row(1))
    with pytest.raises(InputError, match='prompt 0 of "snapkv 4x", known, occurs twice'):
        read_cells(path, path)


def test_files_of_two_workloads_are_refused(tmp_path: Path) -> None:
    other = replace(FACTS, haystack="essays.json 12345678")
    (tmp_path / "other").write_text(to_json(replace(row(1), facts=other)) + "\n")
    with pytest.raises(InputError, match="a table holds one workload"):
        read_cells(_file(tmp_path, row(0)), tmp_path / "other")


def test_cells_read_back_the_same_and_give_the_table_of_their_rows(tmp_path: Path) -> None:
    rows = [row(i, ("single", "multikey")[i % 2], score=i / 7, mode="unknown", size="8x") for i in range(8)]
    path = _file(tmp_path, *rows)
    kept = tmp_path / "cells.jsonl"
    kept.write_text("".join(to_json(cell) + "\n" for cell in read_cells(path)))
    assert read_cells(kept) == read_cells(path) == condense(rows)
    assert table(read_cells(kept)) == table(condense(rows))
