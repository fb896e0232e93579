"""Runs on one page: shards that merge, runs that stand apart, rows that contradict each other, and bad folders."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kvfold.bench.record import DIAGNOSTICS, PROMPTS, ROWS, read_run
from kvfold.bench.report.merge import percent, read_sections
from kvfold.bench.report.page import page, section_names
from kvfold.errors import InputError
from tests.bench.report_runs import EXAMPLE, Elements, row, rows, write

ALL = read_run(EXAMPLE).rows


def test_shards_give_the_page_of_the_whole(tmp_path: Path) -> None:
    halves = [write(tmp_path / name, [r for r in ALL if r.index % 2 == i]) for i, name in enumerate("ab")]
    (merged,) = read_sections(halves)
    assert len(merged.runs) == 2 and set(map(str, merged.rows)) == set(map(str, ALL))


def test_a_run_given_twice_counts_once() -> None:
    (section,) = read_sections([EXAMPLE, EXAMPLE])
    assert len(section.runs) == 1 and section.rows == ALL


def test_rows_may_differ_in_time_alone(tmp_path: Path) -> None:
    slow = [replace(r, prefill_s=9.0, first_token_s=9.0, decode_ms=None) for r in ALL]
    (section,) = read_sections([EXAMPLE, write(tmp_path / "slow", slow)])
    assert section.rows == ALL


@pytest.mark.parametrize("changes", [{"score": 0.25}, {"answer": "no"}, {"resident_bytes": 1}, {"facts": {}}])
def test_rows_that_contradict_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    other = write(tmp_path / "other", [*ALL[:-2], replace(ALL[-2], **changes)])
    what = f"differ in {next(iter(changes))} of needle needles_3 1000 2 unknown int4 100%"
    with pytest.raises(InputError, match=what):
        read_sections([EXAMPLE, other])


def test_models_stand_apart_in_the_order_they_came(tmp_path: Path) -> None:
    other = write(tmp_path / "other", [replace(r, score=0.0) for r in ALL[:1]], model="other")
    sections = read_sections([other, EXAMPLE])
    assert section_names(sections) == ["other", "example"]
    elements = Elements(page(sections))
    assert elements.values("button", "data-choose")[:2] == ["other", "example"]
    assert [name for name in elements.values("section", "id") if name.startswith("provenance")] == [
        "provenance-0",
        "provenance-1",
    ]


def test_seeds_of_one_model_stand_apart(tmp_path: Path) -> None:
    sections = read_sections([EXAMPLE, write(tmp_path / "other", ALL[:1], seed=7)])
    assert [name.split(", ")[:2] for name in section_names(sections)] == [["example", "seed 0"], ["example", "seed 7"]]


def test_times_of_two_devices_are_not_mixed(tmp_path: Path) -> None:
    first = write(tmp_path / "a", [row("full", "100%", 1.0, 0, decode_ms=1.0)], device="fast")
    second = write(tmp_path / "b", [row("full", "100%", 1.0, 1, decode_ms=9.0)], device="slow")
    text = Elements(page(read_sections([first, second]))).text
    assert "fast1 MB" in text and "slow1 MB" in text


def test_every_run_says_where_it_comes_from(tmp_path: Path) -> None:
    shards = [
        write(tmp_path / str(i), rows("full", "100%", [1.0]), command=f"kvfold bench --shard {i}/2") for i in (0, 1)
    ]
    text = Elements(page(read_sections(shards))).text
    assert "kvfold bench --shard 0/2" in text and "kvfold bench --shard 1/2" in text


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ALL)
    with (folder / ROWS).open("a") as file:
        file.write(json.dumps(asdict(replace(ALL[0], index=99)))[:-5])
    assert read_sections([folder])[0].rows == ALL


def test_a_run_without_rows_is_told_to_finish(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no rows yet; finish the run first"):
        read_sections([write(tmp_path / "run", [])])


def test_no_runs_at_all() -> None:
    with pytest.raises(InputError, match="give one or more folders"):
        read_sections([])


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", ALL[:1])
    (folder / ROWS).write_text(json.dumps({**asdict(ALL[0]), "colour": "red"}) + "\n")
    with pytest.raises(InputError, match=r"rows.jsonl, line 1, is no Row of a run"):
        read_sections([folder])


@pytest.mark.parametrize(
    "changes",
    [
        {"score": 1.5},
        {"score": "high"},
        {"score": float("nan")},
        {"full_bytes": 0},
        {"resident_bytes": -1},
        {"decode_ms": "fast"},
        {"mode": "guessed"},
        {"answer": None},
        {"facts": []},
        {"length": 1.5},
    ],
)
def test_values_of_the_wrong_kind_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = write(tmp_path / "run", [replace(row("full", "100%", 1.0), **changes)])
    with pytest.raises(InputError, match=f"holds a Row with {next(iter(changes))} "):
        read_sections([folder])


@pytest.mark.parametrize(
    "changes", [{"model": 7}, {"weights": None}, {"versions": {"torch": 2}}, {"lengths": 4000}, {"seed": True}]
)
def test_a_description_of_the_wrong_kind_is_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"holds a Run with {next(iter(changes))} "):
        read_sections([write(tmp_path / "run", ALL, **changes)])


@pytest.mark.parametrize(("name", "changes"), [(PROMPTS, {"question": 1}), (DIAGNOSTICS, {"hit_rate": [0.5]})])
def test_other_lines_of_the_wrong_kind_are_named(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    folder = write(tmp_path / "run", ALL)
    first = json.loads((EXAMPLE / name).read_text().splitlines()[0])
    (folder / name).write_text(json.dumps(first | changes) + "\n")
    with pytest.raises(InputError, match=f"with {next(iter(changes))} "):
        read_sections([folder])


@pytest.mark.parametrize("memory", ["12.5", "half", "-3%", "0%", "nan%", "inf%"])
def test_memories_are_shares(memory: str) -> None:
    with pytest.raises(InputError, match="no share of the full cache"):
        percent(memory)


def test_memories_come_largest_first() -> None:
    (section,) = read_sections([EXAMPLE])
    assert sorted(("own", *section.memories), key=percent) == ["own", "25%", "100%"]
    assert section.memories == ("100%", "25%") and section.policies == ("full", "keydiff", "int4")
