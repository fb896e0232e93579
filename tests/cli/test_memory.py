"""`kvfold memory`: writes facts, recalls them, and tells what cannot be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Call

SAID = "I live in Berlin. My dog is called Rex. What is this? I work at Siemens."


@pytest.fixture
def file(tmp_path: Path) -> tuple[str, ...]:
    return "--file", str(tmp_path / "memory.db"), "--embedder", "hashed"


def test_what_was_added_is_recalled_by_the_same_user_alone(call: Call, file: tuple[str, ...]) -> None:
    done = call("memory", "add", "--user", "anna", *file, SAID)
    assert done.code == 0 and done.out.endswith("\n3 facts written\n")
    asked = call("memory", "ask", "--user", "anna", *file, "Where do I live?", "--json")
    assert json.loads(asked.out)[0]["text"] == "I live in Berlin."
    other = call("memory", "ask", "--user", "ben", *file, "Where do I live?", "--json")
    assert (other.code, json.loads(other.out)) == (0, [])


def test_nothing_new_is_said(call: Call, file: tuple[str, ...]) -> None:
    for text in ("Where do I live?", "I live in Berlin.", "I live in Berlin."):
        done = call("memory", "add", "--user", "anna", *file, text)
    assert (done.code, done.out) == (0, "0 facts written\n") and "not written" in done.err


def test_nothing_near_is_said(call: Call, file: tuple[str, ...]) -> None:
    call("memory", "add", "--user", "anna", *file, SAID)
    done = call("memory", "ask", "--user", "anna", *file, "Which opera did Verdi finish last?")
    assert (done.code, done.out) == (0, "") and "nothing near" in done.err


def test_facts_are_listed_by_id(call: Call, file: tuple[str, ...]) -> None:
    call("memory", "add", "--user", "anna", *file, SAID, "--at", "2026-03-01", "--source", "chat-1")
    listed = json.loads(call("memory", "ls", "--user", "anna", *file, "--json").out)
    assert [(fact["id"], fact["source"]) for fact in listed] == [(1, "chat-1"), (2, "chat-1"), (3, "chat-1")]
    assert [SAID[slice(*fact["span"])] for fact in listed] == [fact["text"] for fact in listed]
    assert json.loads(call("memory", "ls", "--user", "anna", *file, "--json", "--at", "2026-02-28").out) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("add", "--user", "anna", "a b", "--at", "May"), '"May" is no date; write for example 2026-03-01'),
        (("add", "--user", " ", "a b"), "the text is empty"),
        (("add", "--user", "a" * 600, "a b"), "write a name of 1 to 512 characters"),
        (("add", "--user", "anna", "a b", "--embedder", "tfidf"), "tfidf depends on the other texts"),
        (("add", "--user", "anna", "a b", "--embedder", "nope"), 'no embedder "nope"'),
        (("add", "--user", "anna", "a b", "--file", "/proc/nope/memory.db"), "does not exist; name one"),
        (("ask", "--user", "anna", "a"), "does not exist; name the file that facts were added to"),
        (("ls",), "does not exist"),
        (("export", "--user", "anna"), "does not exist"),
        (("forget", "--user", "anna"), "does not exist"),
        (("ls", "--at", "2026-03-01"), "give --user, too"),
    ],
)
def test_what_cannot_be_is_one_line(call: Call, tmp_path: Path, arguments: tuple[str, ...], told: str) -> None:
    file = () if "--file" in arguments else ("--file", str(tmp_path / "memory.db"))
    done = call("memory", *arguments, *file)
    assert done.code == 2 and told in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "memory.db").exists()


def test_an_update_ends_the_older_fact_and_a_date_finds_it(call: Call, file: tuple[str, ...]) -> None:
    call("memory", "add", "--user", "anna", *file, "I live in Berlin.", "--at", "2026-01-05")
    done = call("memory", "add", "--user", "anna", *file, "I moved to Paris.", "--at", "2026-03-01")
    assert done.out.endswith("\nends: I live in Berlin. (fact 1, valid from 2026-01-05)\n1 fact written\n")
    (rome,) = json.loads(call("memory", "add", "--user", "anna", *file, "I moved to Rome.", "--json").out)
    assert [old["text"] for old in rome["ends"]] == ["I moved to Paris."]
    for date, city in (("2026-01-05", "Berlin"), ("2026-02-28", "Berlin"), ("2026-03-01", "Paris")):
        found = json.loads(
            call("memory", "ask", "--user", "anna", *file, "Where do I live?", "--at", date, "--json").out
        )
        assert [city in fact["text"] for fact in found] == [True]


def test_forget_export_and_import(call: Call, file: tuple[str, ...], tmp_path: Path) -> None:
    call("memory", "add", "--user", "anna", *file, SAID)
    out = tmp_path / "anna.jsonl"
    assert call("memory", "export", "--user", "anna", *file, "--out", out).out == f"3 facts written to {out}\n"
    assert out.stat().st_mode & 0o777 == 0o600
    told = json.loads(call("memory", "export", "--user", "anna", *file, "--out", out, "--json").out)
    assert told == {"exported": 3, "file": str(out)}
    assert call("memory", "export", "--user", "anna", *file).out == out.read_text(encoding="utf-8")
    assert call("memory", "forget", "--user", "anna", *file, "--id", 1, "--id", 7).out == "1 fact forgotten\n"
    assert json.loads(call("memory", "forget", "--user", "anna", *file, "--json").out) == {"forgotten": 2}
    assert b"Siemens" not in (tmp_path / "memory.db").read_bytes()
    assert call("memory", "import", "--user", "ben", *file, out).out == "3 facts imported\n"
    assert json.loads(call("memory", "ls", *file, "--json").out) == [{"user": "ben", "facts": 3}]


def test_tenants_have_users_of_their_own(call: Call, file: tuple[str, ...]) -> None:
    call("memory", "add", "--user", "anna", "--tenant", "one", *file, SAID)
    assert json.loads(call("memory", "ls", "--user", "anna", "--tenant", "two", *file, "--json").out) == []
    assert len(json.loads(call("memory", "ls", "--user", "anna", "--tenant", "one", *file, "--json").out)) == 3


def test_a_damaged_file_is_one_line(call: Call, tmp_path: Path) -> None:
    (tmp_path / "memory.db").write_bytes(b"nothing" * 999)
    done = call("memory", "ls", "--file", tmp_path / "memory.db")
    assert done.code == 2 and "is damaged or no SQLite file" in done.err and done.err.count("\n") == 1


def test_eval_compares_systems(call: Call) -> None:
    done = call("memory", "eval", "--facts", 12, "--sessions", 5, "--questions", 10, "--embedder", "hashed")
    lines = [line.split("\t") for line in done.out.splitlines()]
    assert done.code == 0 and [line[0] for line in lines] == ["system", "memory", "bm25", "full", "nothing"]
    assert lines[4][1] == "40 %"


def test_eval_of_a_users_own_questions(call: Call, file: tuple[str, ...], tmp_path: Path) -> None:
    call("memory", "add", "--user", "anna", *file, "I live in Berlin.", "--at", "2026-01-05")
    call("memory", "add", "--user", "anna", *file, "I moved to Paris.", "--at", "2026-03-01")
    questions = tmp_path / "questions.jsonl"
    asked = [{"question": "Where do I live?", "answer": "Paris"}, {"question": "What is my shoe size?", "answer": None}]
    asked += [{"question": "Where did I live?", "answer": "Berlin", "at": "2026-02-01"}]
    questions.write_text("\n".join(map(json.dumps, asked)), encoding="utf-8")
    done = call("memory", "eval", "--user", "anna", *file, "--on", questions, "--json")
    assert {row["system"]: row["accuracy"] for row in json.loads(done.out)}["memory"] == 1.0
    assert "--user and --on go together" in call("memory", "eval", "--on", questions).err


def test_the_closest_facts_are_shown_on_demand(call: Call, file: tuple[str, ...]) -> None:
    call("memory", "add", "--user", "anna", *file, SAID)
    asked = ("memory", "ask", "--user", "anna", *file, "Which opera did Verdi finish last?")
    assert call(*asked).out == "" and len(call(*asked, "--closest").out.splitlines()) == 4


def test_a_model_answers_from_recalled_facts(call: Call, file: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """And from a stored prefix of them, which is read once and goes with them."""
    call("memory", "add", "--user", "anna", *file, SAID)
    asked = ("memory", "ask", "--user", "anna", *file, "Where do I live?", "--model", folder, "--max-new-tokens", 4)
    done = call(*asked, "--json")
    found = json.loads(done.out)
    assert done.code == 0 and found["answer"] and found["facts"][0]["text"] == "I live in Berlin."
    assert call(*asked).out == f"{found['answer']}\n"
    stored = call(*asked, "--kv-prefix", "--policy", "int8")
    assert stored.code == 0 and len(list((tmp_path / "memory.db.kv").glob("*.kvfold"))) == 1
    assert call(*asked, "--kv-prefix", "--policy", "int8").out == stored.out
    call("memory", "forget", "--user", "anna", *file)
    assert list((tmp_path / "memory.db.kv").glob("*")) == []
    assert call(*asked).out == "" and "--kv-prefix keeps what a model has read" in call(*asked[:9], "--kv-prefix").err


def test_an_export_never_replaces_the_memory(call: Call, file: tuple[str, ...]) -> None:
    call("memory", "add", "--user", "anna", *file, SAID)
    done = call("memory", "export", "--user", "anna", *file, "--out", file[1])
    assert done.code == 2 and "is the memory itself" in done.err
    hard = Path(f"{file[1]}.hard")
    hard.hardlink_to(file[1])
    for name in (f"{file[1]}-wal", f"{file[1]}-shm", hard):
        assert "is the memory itself" in call("memory", "export", "--user", "anna", *file, "--out", name).err
    assert len(json.loads(call("memory", "ls", "--user", "anna", *file, "--json").out)) == 3


def test_facts_cannot_steer_a_terminal(call: Call, file: tuple[str, ...]) -> None:
    call("memory", "add", "--user", "an\x1b[31mna", *file, "I live in \x1b[2J\x9bRome\x07.")
    shown = call("memory", "ls", "--user", "an\x1b[31mna", *file).out + call("memory", "ls", *file).out
    assert r"I live in \x1b[2J\x9bRome\x07." in shown and r"an\x1b[31mna" in shown
    assert not set("\x1b\x9b\x07") & set(shown)
