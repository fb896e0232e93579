"""`kvfold run`: answers, tables and JSON are those of sessions; what cannot work is told in one line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import kvfold
from kvfold.cli.options import split_policies
from kvfold.pages.page_config import PageConfig
from tests.cli.conftest import Call

ASK = "what of the sea?"


def _json(call: Call, *arguments: object) -> dict[str, Any]:
    done = call("run", *arguments, "--json")
    assert done.code == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


def test_the_answer_is_that_of_a_session(call: Call, folder: Path, document: Path) -> None:
    said = _json(call, "--model", folder, "--context", document, "--ask", ASK, "--policy", "knorm + 2x")
    with kvfold.Session(kvfold.load(str(folder)), "knorm + 2x") as session:
        session.extend(document.read_text(encoding="utf-8"))
        stats, reply = session.stats(), session.ask(ASK, max_new_tokens=64)
    (answer,) = said["answers"]
    assert answer["answer"] == reply.text
    assert (answer["num_tokens"], answer["resident_bytes"]) == (stats.logical_len, stats.resident_bytes)
    assert answer["slots_per_head"] == stats.mean_slots == -(-stats.logical_len // 2) - PageConfig.open_len
    assert (answer["full_bytes"], answer["bytes_per_step"]) == (stats.full_bytes, stats.bytes_per_step)


def test_a_score_that_reads_twice(call: Call, folder: Path, document: Path) -> None:
    policy = "kvzip + global + 2x"
    question = ("--context", document, "--ask", ASK, "--max-new-tokens", 3)
    said = _json(call, "--model", folder, *question, "--policy", policy)
    with kvfold.Session(kvfold.load(str(folder)), policy) as session:
        session.extend(document.read_text(encoding="utf-8"))
        stats, reply = session.stats(), session.ask(ASK, max_new_tokens=3)
    (answer,) = said["answers"]
    assert (answer["answer"], answer["resident_bytes"]) == (reply.text, stats.resident_bytes)
    assert len({length for layer in stats.slots for length in layer}) > 1


def test_json_has_everything_the_table_has(call: Call, folder: Path, document: Path) -> None:
    options = ("--max-new-tokens", 3, "--policy", "int4", "--compare", "full, snapkv(8, 5) + 2x")
    said = _json(call, "--model", folder, "--context", document, "--ask", ASK, "--ask", "why?", *options)
    assert set(said) == {"model", "device", "dtype", "kv_dtype", "question_known", "answers"}
    rows = said["answers"]
    assert [(row["policy"], row["question"]) for row in rows] == [
        (policy, question) for policy in ("int4", "full", "snapkv(window=8) + 2x") for question in (ASK, "why?")
    ]
    assert [row["shares_prefill"] for row in rows] == [False, True] * 3
    for row in rows:
        assert row["num_new_tokens"] == 3
        assert row["reason"] == "length"
        assert row["ratio"] == row["full_bytes"] / row["resident_bytes"]
        assert row["prefill_s"] > 0
        assert row["decode_ms"] > 0
        assert "positions" not in row
    by_policy = {row["policy"]: row for row in rows}
    assert by_policy["full"]["resident_bytes"] > by_policy["int4"]["resident_bytes"]
    assert by_policy["full"]["slots_per_head"] == by_policy["int4"]["slots_per_head"]


def test_a_known_question_is_compressed_with_the_document(call: Call, folder: Path, document: Path) -> None:
    options = ("--model", folder, "--context", document, "--ask", ASK, "--policy", "snapkv + 4x", "--max-new-tokens", 2)
    unknown, known = _json(call, *options), _json(call, *options, "--question-known")
    assert (unknown["question_known"], known["question_known"]) == (False, True)
    extra = known["answers"][0]["num_tokens"] - unknown["answers"][0]["num_tokens"]
    assert extra >= len(ASK) // 2
    assert call("run", *options).out.startswith("question unknown: the document is compressed once")
    assert call("run", *options, "--question-known").out.startswith("question known: document and question")


def test_the_table_is_plain_in_a_pipe_and_starts_with_the_policy(call: Call, folder: Path, document: Path) -> None:
    options = ("--max-new-tokens", 2, "--policy", "knorm + 4x", "--compare", "full,int8")
    done = call("run", "--model", folder, "--context", document, "--ask", ASK, *options)
    lines = done.out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("policy"))
    assert lines[at].split("\t") == [
        "policy", "ask", "answer", "slots/tokens", "resident", "ratio", "read/step", "prefill s", "ms/token",
    ]  # fmt: skip
    rows = [line.split("\t") for line in lines[at + 1 :]]
    assert [row[0] for row in rows] == ["knorm + 4x", "full", "int8"] and {len(row) for row in rows} == {9}
    assert "\x1b" not in done.out
    assert done.err == ""


def test_answers_stand_as_text_without_a_comparison(call: Call, folder: Path, document: Path) -> None:
    options = ("--model", folder, "--context", document, "--ask", ASK, "--max-new-tokens", 8)
    answer = _json(call, *options)["answers"][0]["answer"].strip()
    out = call("run", *options).out
    assert f"1. {ASK}\n\n1. {answer.splitlines()[0]}" in out
    assert "answer" not in out.splitlines()


def test_kept_positions(call: Call, folder: Path, document: Path) -> None:
    options = ("--model", folder, "--context", document, "--ask", ASK, "--policy", "streaming + 4x", "--show-kept")
    (answer,) = _json(call, *options, "--max-new-tokens", 2)["answers"]
    num_tokens, size = answer["num_tokens"], -(-answer["num_tokens"] // 4) - PageConfig.open_len
    expected = [*range(4), *range(num_tokens - (size - 4), num_tokens)]
    assert answer["positions"] == [[expected] * 2] * 3
    lines = [line for line in call("run", *options).out.splitlines() if line.startswith("layer")]
    assert len(lines) == 3
    assert lines[0].endswith(f"| {size}..{size}, mean {size}")
    assert lines[0].split("|")[1].strip("▁▂▃▄▅▆▇█").isspace()  # a gap between the sinks and the recent ones


def test_context_from_stdin(call: Call, folder: Path, document: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--model", folder, "--ask", ASK, "--max-new-tokens", 4)
    from_file = _json(call, *options, "--context", document)["answers"][0]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(document.read_bytes())))
    assert _json(call, *options, "--context", "-")["answers"][0]["answer"] == from_file["answer"]


def test_sampling_options_reach_the_sampler(call: Call, folder: Path, document: Path) -> None:
    options = ("--model", folder, "--context", document, "--ask", ASK, "--max-new-tokens", 16)
    hot = [_json(call, *options, "--temperature", 2, "--seed", seed)["answers"][0]["answer"] for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    greedy = _json(call, *options)["answers"][0]["answer"]
    assert _json(call, *options, "--temperature", 2, "--top-k", 1)["answers"][0]["answer"] == greedy
    assert _json(call, *options, "--temperature", 2, "--top-p", 1e-6)["answers"][0]["answer"] == greedy
    stopped = _json(call, *options, "--stop", greedy[3:5])["answers"][0]
    assert (stopped["reason"], stopped["answer"]) == ("stop", greedy[: greedy.index(greedy[3:5])])


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--policy", "knorm + 100x"), 2, "the smallest possible is"),
        (("--model", "nothing-here"), 2, 'no model "nothing-here"'),
        (("--memory", "256KB"), 1, "needed; raise --memory, use a policy that keeps less, or shorten the text"),
        (("--memory", "256KB"), 1, "the arena (KV-cache memory) of 196.6 kB has"),
    ],
)
def test_errors_are_one_line(
    call: Call, folder: Path, document: Path, arguments: tuple[object, ...], code: int, message: str
) -> None:
    done = call("run", "--model", folder, "--context", document, "--ask", ASK, *arguments)
    assert done.code == code
    assert done.err.startswith("error: ")
    assert message in done.err
    assert done.err.count("\n") == 1


def test_errors_of_transformers_are_told_whole(call: Call, document: Path, tmp_path: Path) -> None:
    """That of a folder without a tokenizer has several lines."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    done = call("run", "--model", tmp_path, "--context", document, "--ask", ASK)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "Couldn't instantiate the backend tokenizer from one of: (1) a" in done.err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("full", ["full"]),
        ("full, int4", ["full", "int4"]),
        ("snapkv(8, 5) + 2x,min(8x, 64tok) + knorm", ["snapkv(8, 5) + 2x", "min(8x, 64tok) + knorm"]),
    ],
)
def test_policies_are_split_outside_parentheses(text: str, parts: list[str]) -> None:
    assert split_policies(text) == parts
