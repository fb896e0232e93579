"""The table of a run, from rows that can be counted by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from kvfold.bench.record import TOO_SMALL, Row, read_run
from kvfold.bench.statistics import mean_interval
from kvfold.bench.summary import above_memory, difference_text, lines, score_text

EXAMPLE = read_run(Path(__file__).parent / "data" / "example_run")


def _row(index: int, score: float, policy: str = "keydiff", memory: str = "25%") -> Row:
    ran = {"resident_bytes": 24, "full_bytes": 100, "score": score, "decode_ms": 10.0 + index}
    return Row("kv", "kv", 1000, index, "known", policy, memory, policy, **ran)  # type: ignore[arg-type]


def test_scores_and_differences_are_paired_by_sample() -> None:
    full = [_row(index, 1.0, "full", "100%") for index in (2, 1, 0)]
    small = [_row(0, 1.0), _row(1, 0.5), _row(2, 0.0), _row(3, 1.0)]  # the full cache has no sample 3
    whole, line = lines(full + small)
    assert whole.difference is None and whole.score is not None and whole.score.mean == 1.0
    assert line.score == mean_interval([1.0, 0.5, 0.0, 1.0])
    assert line.difference is not None and line.difference.mean == -0.5 and line.difference.num_samples == 3
    assert (line.bytes_percent, line.decode_ms, line.num_samples) == (24.0, 11.5, 4)


def test_what_could_not_run_says_why() -> None:
    noted = Row("kv", "kv", 1000, 0, "known", "int4", "25%", "int4", note=TOO_SMALL)
    (line,) = lines([noted])
    assert (line.score, line.num_samples, score_text(line), difference_text(line)) == (None, 0, TOO_SMALL, "")


def test_one_sample_has_no_interval() -> None:
    (line,) = lines([_row(0, 0.5)])
    assert score_text(line) == "50" and line.difference is None


def test_texts() -> None:
    full = [_row(index, 1.0, "full", "100%") for index in range(4)]
    _, line = lines(full + [_row(index, 0.0) for index in range(4)])
    assert score_text(line) == "0 [0, 0]" and difference_text(line) == "-100 [-100, -100]"
    _, line = lines(full + [_row(index, 0.1 * (index % 2)) for index in range(4)])
    assert difference_text(line) == "-95 [-100, -90]*"


def test_rows_above_their_memory_are_found() -> None:
    fits = replace(_row(0, 1.0), resident_bytes=252, full_bytes=1000)
    above = replace(_row(1, 1.0), resident_bytes=253, full_bytes=1000)
    whole = replace(_row(1, 1.0, "full", "100%"), resident_bytes=106)
    own = replace(_row(1, 1.0, memory="own"), resident_bytes=1060, full_bytes=1000)
    assert above_memory([fits, above, whole, own]) == [above]


def test_the_example_has_a_line_for_every_cell() -> None:
    found = lines(EXAMPLE.rows)
    assert len(found) == 2 * 2 * 4
    assert {line.num_samples for line in found if line.note} == {0}
