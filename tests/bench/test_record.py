"""Folders of runs: read back as written, whole lines only."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kvfold.bench.record import (
    DIAGNOSTICS,
    PROMPTS,
    ROWS,
    RUN,
    Row,
    RunWriter,
    append_lines,
    drop_cut_line,
    read_lines,
    read_run,
    write_compressed,
    write_run,
)
from kvfold.errors import InputError

EXAMPLE = Path(__file__).parent / "data" / "example_run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(EXAMPLE, tmp_path / "run"))


def test_the_example_is_whole() -> None:
    found = read_run(EXAMPLE)
    assert len(found.rows) == 2 * 3 * 2 * (1 + 1 + 2)  # tasks, samples, modes; full, keydiff, int4 in two memories
    assert len({row.key for row in found.rows}) == len(found.rows)
    assert {row.key for row in found.prompts} == {row.key[:4] for row in found.rows}
    assert found.diagnostics and {row.key for row in found.diagnostics} <= {row.key for row in found.rows}


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    found = read_run(EXAMPLE)
    write_run(tmp_path / "again", found.run)
    append_lines(tmp_path / "again" / ROWS, found.rows[:3])
    append_lines(tmp_path / "again" / ROWS, found.rows[3:])
    append_lines(tmp_path / "again" / PROMPTS, found.prompts)
    append_lines(tmp_path / "again" / DIAGNOSTICS, found.diagnostics)
    assert read_run(tmp_path / "again") == found


def test_a_kept_run_is_compressed_and_can_go_on(folder: Path) -> None:
    found = read_run(EXAMPLE)
    (folder / ROWS).unlink()
    write_compressed(folder / ROWS, found.rows[:5])
    assert [path.name for path in folder.glob(f"{ROWS}*")] == [f"{ROWS}.xz"]
    assert read_run(folder).rows == found.rows[:5]
    RunWriter(folder, found.run).add(found.rows, [])  # only what is missing
    assert read_run(folder) == found


def test_a_damaged_compressed_file_is_told(tmp_path: Path) -> None:
    write_compressed(tmp_path / ROWS, read_run(EXAMPLE).rows)
    path = tmp_path / f"{ROWS}.xz"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(InputError, match=r"rows\.jsonl\.xz is damaged"):
        list(read_lines(Row, tmp_path / ROWS))


def test_a_row_holds_what_its_defaults_do_not_say(tmp_path: Path) -> None:
    empty = Row("passkey", "passkey", 1000, 0, "known", "int4", "25%", "int4")
    rows = [replace(empty, note="too small"), replace(empty, score=0.0, kl=0.0, new_tokens=3, facts={"depth": 0.5})]
    append_lines(tmp_path / ROWS, rows)
    first, second = (tmp_path / ROWS).read_text().splitlines()
    assert first.endswith('"resolved":"int4","note":"too small"}')
    assert second.endswith('"resolved":"int4","new_tokens":3,"score":0.0,"kl":0.0,"facts":{"depth":0.5}}')
    assert list(read_lines(Row, tmp_path / ROWS)) == rows


def test_a_torn_last_line_is_left_out_and_dropped(folder: Path) -> None:
    rows = read_run(folder).rows
    path = folder / ROWS
    path.write_bytes(path.read_bytes()[:-20])
    assert read_run(folder).rows == rows[:-1]
    drop_cut_line(path)
    append_lines(path, rows[-1:])
    assert read_run(folder).rows == rows


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 1, is not JSON"),
        ('{"colour": 1}', "line 1, is no Row"),
        ('{"task": "x"}', "is no Row"),
        ("[]", "Row"),
    ],
)
def test_foreign_lines_are_refused(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / ROWS).write_text(line + "\n")
    with pytest.raises(InputError, match=told):
        list(read_lines(Row, tmp_path / ROWS))


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is no run of the benchmark: it has no run\.json"):
        read_run(tmp_path)
    (tmp_path / RUN).write_text("nonsense")
    with pytest.raises(InputError, match="is not JSON"):
        read_run(tmp_path)


def test_a_run_that_goes_on_names_every_commit_once(folder: Path) -> None:
    run = read_run(folder).run
    for commit in ("abc1234", "abc1234", run.commit):
        RunWriter(folder, replace(run, commit=commit))
    assert read_run(folder).run == replace(run, commit=f"{run.commit}, abc1234")
