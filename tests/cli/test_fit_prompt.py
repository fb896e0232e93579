"""`kvfold fit-prompt` and `kvfold chat --prefix`: the file is a session, and what is printed was measured."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

import kvfold
from tests.cli.conftest import Call, Done


@pytest.fixture
def fitted(call: Call, folder: Path, document: Path, tmp_path: Path) -> tuple[Path, Done]:
    path = tmp_path / "prompt.kvfold"
    options = ("--ratio", 6, "--ask", "Who?", "--ask", "Where?", "--answer-tokens", 8)
    return path, call("fit-prompt", document, "--model", folder, "--out", path, *options, "--json")


def test_the_file_is_a_session_that_read_a_system_message(
    fitted: tuple[Path, Done], folder: Path, document: Path
) -> None:
    path, done = fitted
    assert (done.code, done.err) == (0, "")
    report, model = json.loads(done.out), kvfold.load(str(folder))
    text = document.read_text(encoding="utf-8")
    with kvfold.Session.load(model, path) as session:
        assert model.tokenizer.decode(session.token_ids) == f"<s><system>{text}<end>\n"
        stats = session.stats()
        assert session.policy == kvfold.Policy.parse("kvzip + global + fit(study) + 6x")
        assert session.cache.page_class(0).has_bias
    assert (report["num_tokens"], report["slots_per_head"]) == (stats.logical_len, stats.mean_slots)
    assert (report["resident_bytes"], report["full_bytes"]) == (stats.resident_bytes, stats.full_bytes)
    assert report["file_bytes"] == path.stat().st_size
    assert [row["question"] for row in report["questions"]] == ["Who?", "Where?"]
    assert report["reference_tokens"] == 16 and report["kl_nats"] > 0


def test_a_table_is_printed_for_people(call: Call, folder: Path, document: Path, tmp_path: Path) -> None:
    options = ("--ratio", 6, "--policy", "knorm + int4", "--ask", "Who?", "--answer-tokens", 8)
    done = call("fit-prompt", document, "--model", folder, "--out", tmp_path / "x", *options)
    assert (done.code, done.err) == (0, "")
    assert "under knorm + 6x + int4" in done.out and "before" in done.out and "Who?" in done.out


def test_a_chat_begins_with_the_prefix_and_keeps_the_talk(
    fitted: tuple[Path, Done], call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = fitted
    lines = ["hello there", "and the sea?", "/reset", "hello there"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    done = call("chat", "--model", folder, "--prefix", path, "--max-new-tokens", 40)
    replies = []
    with kvfold.Session.load(kvfold.load(str(folder)), path) as session:
        for line in lines[:2]:
            replies.append(session.extend(line, compress=False).generate(max_new_tokens=40).text)
    assert (done.code, done.err) == (0, "")
    assert done.out == "".join(f"{text}\n" for text in (*replies, replies[0]))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--ratio", 1), "compresses nothing"),
        (("--ratio", "nan"), "compresses nothing"),
        (("--answer-tokens", 0), "is no count"),
        (("--policy", "full"), "keeps everything"),
        (("--ratio", 500), "the smallest possible"),
    ],
)
def test_what_cannot_work_is_one_line(
    call: Call, folder: Path, document: Path, tmp_path: Path, options: tuple[object, ...], reason: str
) -> None:
    done = call("fit-prompt", document, "--model", folder, "--out", tmp_path / "x", *options)
    assert done.code == 2 and reason in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_folder_that_is_not_there_is_told_first(call: Call, document: Path, tmp_path: Path) -> None:
    done = call("fit-prompt", document, "--model", "nonesuch", "--out", tmp_path / "none" / "x")
    assert done.code == 2 and "does not exist" in done.err
