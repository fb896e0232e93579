"""The exchange with other libraries: prompts out, answers in, runs and a table.

kvfold answers on a near-zero-size model; the other side's file is written by the test, for its library lives in an
environment of its own.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path

import pytest

from benchmarks.peers.collect import PEER, collect, memory_text
from benchmarks.peers.compare import compare, lines_of
from benchmarks.peers.exchange import (
    FORMAT,
    WHOLE,
    Answer,
    AnswerFile,
    Header,
    Origin,
    num_kept,
    read_answers,
    read_jobs,
    write_jobs,
)
from benchmarks.peers.methods import FULL, PRESSES
from benchmarks.peers.ours import SIDE, answer_all, policy_text
from benchmarks.peers.prompts import Samples
from kvfold.bench.record import read_run
from kvfold.errors import InputError

KEYDIFF = PRESSES[2]
ORIGIN = Origin(FORMAT, PEER, "c0ffee", "2026-11-15T12:00:00Z", "CPU", {"kvpress": "0"})


@pytest.fixture
def header(tiny_llama: Path) -> Header:
    return Header(
        FORMAT, "jobs", "c0ffee", "tiny-llama", str(tiny_llama), "float32", "cpu", (), 700, 0, 2, ("passkey:passkey",),
        ("known", "unknown"), (2, 4), (FULL, KEYDIFF),
    )  # fmt: skip


@pytest.fixture
def work(header: Header, tmp_path: Path) -> Path:
    samples = Samples(header)
    write_jobs(tmp_path / "work", header, [samples.prompt(*sample) for sample in samples])
    return tmp_path / "work"


def test_jobs_come_back_as_they_were(header: Header, work: Path) -> None:
    found, prompts = read_jobs(work)
    assert found == header
    assert [prompt.index for prompt in prompts] == [0, 1]
    known, unknown = prompts[0].parts("known"), prompts[0].parts("unknown")
    assert known[0] + known[1] == unknown[0] + unknown[1]
    assert len(known[1]) == 1


def test_jobs_of_another_format_are_refused(work: Path) -> None:
    lines = (work / "jobs.jsonl").read_text().replace(FORMAT, "something else")
    (work / "jobs.jsonl").write_text(lines)
    with pytest.raises(ValueError, match='format "something else"'):
        read_jobs(work)


def test_kvfold_keeps_as_many_slots_as_the_peer(work: Path) -> None:
    assert answer_all(work, limit_s=1e9)
    header, prompts = read_jobs(work)
    _, answers = read_answers(work / f"{SIDE}.jsonl")
    assert len(answers) == len(prompts) * len(header.modes) * len(header.lanes())
    for answer in answers:
        num_tokens = len(prompts[answer.index].parts(answer.mode)[0])
        assert answer.slots == num_kept(num_tokens, answer.ratio)


def test_a_size_of_any_length_leaves_the_wanted_slots() -> None:
    for num_tokens in range(200, 3000, 37):
        for ratio in (2, 4, 8):
            text = policy_text(KEYDIFF, ratio, num_tokens)
            times = Fraction(text.rsplit(" + ", 1)[1].removesuffix("x"))
            assert math.ceil(num_tokens / times) == num_kept(num_tokens, ratio) + 32
    assert policy_text(FULL, WHOLE, 100) == "full"


def test_answers_go_on_where_they_stopped(work: Path) -> None:
    assert answer_all(work, limit_s=1e9)
    path = work / f"{SIDE}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    per_mode = len(read_jobs(work)[0].lanes())
    path.write_text("".join(lines[: 1 + per_mode]) + lines[1 + per_mode][:20])
    assert answer_all(work, limit_s=1e9)
    again = [json.loads(line) for line in path.read_text().splitlines()]
    first = [json.loads(line) for line in lines]
    assert [row.get("token_ids") for row in again] == [row.get("token_ids") for row in first]


def as_peer(work: Path, change: int) -> None:
    """A peer that gives kvfold's answers, but to `change` of its keydiff rows another one."""
    _, answers = read_answers(work / f"{SIDE}.jsonl")
    file = AnswerFile(work / f"{PEER}.jsonl", ORIGIN)
    left = change
    changed: list[Answer] = []
    for answer in answers:
        if answer.method == KEYDIFF.name and answer.mode == "known" and answer.ratio == 2 and left:
            left -= 1
            answer = replace(answer, token_ids=(40, 41, 42))
        changed.append(answer)
    file.append(changed)


def test_runs_and_table_tell_which_answers_are_the_same(work: Path, tmp_path: Path) -> None:
    assert answer_all(work, limit_s=1e9)
    as_peer(work, change=1)
    assert collect(work, tmp_path / "runs") == 0
    ours, peer = read_run(tmp_path / "runs" / SIDE), read_run(tmp_path / "runs" / PEER)
    assert ours.run.policies == ("full", KEYDIFF.ours)
    assert peer.run.commit == "c0ffee"
    assert peer.run.policies == ("transformers:full", "kvpress:keydiff")
    assert {row.memory for row in ours.rows} == {"100%", "50%", "25%"}
    lines = {(line.peer, line.memory, line.mode): line for line in lines_of(ours, peer)}
    assert lines["kvpress:keydiff", "50%", "known"].num_same == 1
    others = [line.num_same for place, line in lines.items() if place != ("kvpress:keydiff", "50%", "known")]
    assert others == [2] * 5
    assert "1 of 2" in compare(tmp_path / "runs")
    with pytest.raises(InputError, match="never written over"):
        collect(work, tmp_path / "runs")


def test_a_side_that_has_not_answered_is_named(work: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"kvfold\.jsonl does not exist"):
        collect(work, tmp_path / "runs")


def test_bytes_of_both_sides_are_shares_of_the_bf16_cache(work: Path, tmp_path: Path) -> None:
    assert answer_all(work, limit_s=1e9)
    as_peer(work, change=0)
    collect(work, tmp_path / "runs")
    row = next(row for row in read_run(tmp_path / "runs" / PEER).rows if row.memory == "100%")
    assert row.full_bytes == 3 * 2 * 16 * 2 * 2 * (row.prompt_tokens - 1)  # layers, heads, dim, k and v, bytes
    assert row.resident_bytes >= 2 * row.full_bytes  # fp32


def test_shares_are_named() -> None:
    assert [memory_text(ratio) for ratio in (1, 2, 8)] == ["100%", "50%", "12.5%"]


def test_settings_are_plain_json(header: Header) -> None:
    assert json.loads(json.dumps(asdict(header)))["methods"][1]["target"] == "KeyDiffPress"
