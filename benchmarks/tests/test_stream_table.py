"""Means of streams that can be computed by hand; files that lack, repeat or mix blocks are refused."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.stream_blocks import Block
from benchmarks.stream_table import BEGIN, END, caption, means, read_rows, table, with_table
from kvfold.errors import InputError

ROOT = Path(__file__).parents[2]
FACTS = {"workload": "tiny, 2 streams", "device": "a CPU", "commit": "abc1234", "date": "2030-01-01"}


def block(run: str, stream: int, index: int, perplexity: float, **change: int | None) -> Block:
    found = Block(run, f"policy of {run}", stream, index, 10 * (index + 1), math.log(perplexity), 7, 8, 9, 10, 11, 0.5)
    return replace(found, **change)  # type: ignore[arg-type]


BLOCKS = [
    block("stream", 0, 0, 20), block("stream", 0, 1, 40),
    block("stream", 1, 0, 5), block("stream", 1, 1, 10, arena_bytes=99),
    block("control", 0, 0, 20), block("control", 0, 1, 20),
    block("control", 1, 0, 5), block("control", 1, 1, 10),
    block("recent", 1, 0, 50), block("recent", 1, 1, 30, cuda_bytes=None, host_bytes=None),
]  # fmt: skip


def _file(path: Path, blocks: list[Block], **change: str) -> Path:
    path.write_text("".join(json.dumps(asdict(found) | FACTS | change) + "\n" for found in blocks))
    return path


def test_means_by_hand() -> None:
    found = {(mean.run, mean.block): mean for mean in means(BLOCKS)}
    first, second = found["stream", 0], found["stream", 1]
    assert first.perplexity == pytest.approx(10) and first.to_first == 1.0  # the geometric mean of 20 and 5
    assert second.perplexity == pytest.approx(20) and second.to_first == pytest.approx(2)
    assert second.to_control == pytest.approx(math.sqrt(2))
    assert second.control_range == pytest.approx((1, 2))
    assert (second.num_streams, second.arena_bytes, second.end) == (2, 99, 20)


def test_a_run_of_fewer_streams_is_compared_with_the_control_of_these() -> None:
    recent = [mean for mean in means(BLOCKS) if mean.run == "recent"]
    assert [mean.to_control for mean in recent] == pytest.approx([10, 3])
    assert recent[1].cuda_bytes is None and recent[1].host_bytes is None and recent[0].host_bytes == 11


def test_without_a_control_there_is_no_ratio() -> None:
    (first, _) = means(BLOCKS[:2])
    assert first.to_control is None and "| - |" in table(means(BLOCKS[:2]))


def test_table_by_hand() -> None:
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in table(means(BLOCKS)).splitlines()]
    assert lines[0][:4] == ["tokens read", "stream", "control", "recent"]
    assert lines[3] == [
        "20", "20.00", "14.14", "30.00", "2.000", "1.414 (1.000-2.000)", "0.0", "0.0", "0.0",
    ]  # fmt: skip


def test_shards_are_one_run_in_any_order(tmp_path: Path) -> None:
    whole = read_rows([_file(tmp_path / "whole", BLOCKS)])
    shards = [_file(tmp_path / "1", BLOCKS[1::2]), _file(tmp_path / "0", BLOCKS[::2])]
    joined = read_rows(shards)
    assert set(joined.blocks) == set(whole.blocks) == set(BLOCKS)
    by_place = {(mean.run, mean.block): mean for mean in means(joined.blocks)}
    assert by_place == {(mean.run, mean.block): mean for mean in means(whole.blocks)}
    assert joined.facts == [FACTS]
    assert "tiny, 2 streams. " in caption(whole, means(whole.blocks))
    assert "recent: `policy of recent`, 1 streams" in caption(whole, means(whole.blocks))


def test_a_block_given_twice_is_refused(tmp_path: Path) -> None:
    path = _file(tmp_path / "rows", BLOCKS)
    with pytest.raises(InputError, match="occurs twice"):
        read_rows([path, path])


def test_a_stream_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match='stream 1 of run "recent" has 1 of 2 blocks'):
        read_rows([_file(tmp_path / "rows", BLOCKS[:-1])])


def test_two_workloads_are_refused(tmp_path: Path) -> None:
    paths = [_file(tmp_path / "a", BLOCKS[:2]), _file(tmp_path / "b", BLOCKS[2:], workload="other")]
    with pytest.raises(InputError, match="line 1, is of other, not of tiny"):
        read_rows(paths)


@pytest.mark.parametrize("line", ("nonsense", "[]", '{"run": "stream"}'))
def test_foreign_lines_are_refused(tmp_path: Path, line: str) -> None:
    path = _file(tmp_path / "rows", BLOCKS)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InputError, match="line 11, is no block of a stream"):
        read_rows([path])


def test_no_file_and_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_rows([tmp_path / "none"])
    with pytest.raises(InputError, match="no blocks yet"):
        read_rows([_file(tmp_path / "rows", [])])


def test_page_is_written_between_its_markers(tmp_path: Path) -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    written = with_table(page, _file(tmp_path / "rows", BLOCKS))
    assert written.startswith("before\n") and written.endswith(f"{END}\nafter\n") and "old" not in written
    assert "| 20 | 20.00 |" in written
    assert with_table(page, tmp_path / "none") == f"before\n{BEGIN}\n\n{END}\nafter\n"


def test_docs_page_is_current() -> None:
    page = (ROOT / "docs" / "research" / "streaming.md").read_text(encoding="utf-8")
    kept = ROOT / "benchmarks" / "results" / "streams.jsonl"
    assert page == with_table(page, kept), "run `python -m benchmarks.stream_perplexity --docs`"
