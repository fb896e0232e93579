"""`kvfold read`: answers with places, refuses bad input before a model is loaded, goes on after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kvfold.cli.read import _measured
from kvfold.recurse.context import Context
from kvfold.recurse.reader import Reader
from tests.cli.conftest import Call, Start
from tests.recurse.texts import QUESTION, document, long_model, save


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("long"))


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFOLD_HOME", str(tmp_path / "home"))
    path = tmp_path / "notes.txt"
    path.write_text(document(), encoding="utf-8")
    return path


def _arguments(notes: Path, folder: Path, *more: object) -> list[object]:
    model = ("--model", folder, "--device", "cpu", "--memory", "64MB")
    return ["read", notes, "--ask", QUESTION, "--chunk", 200, "--max-new-tokens", 4, *model, *more]


def _leaves(node: dict[str, Any]) -> list[tuple[int, int, str]]:
    if not node["children"]:
        return [(node["start"], node["end"], node["state"])]
    return [leaf for child in node["children"] for leaf in _leaves(child)]


def test_json_has_answer_tree_usage_and_kv(call: Call, notes: Path, long_folder: Path) -> None:
    done = call(*_arguments(notes, long_folder, "--json"))
    found = json.loads(done.out)
    assert done.code == 0 and found["question"] == QUESTION and found["is_complete"]
    assert set(found["kv"]) == {
        "compression_ratio", "memory_saved_bytes", "quality_retention", "throughput_gain", "speculative_speedup"
    }  # fmt: skip
    assert len(_leaves(found["tree"])) == 5 and found["usage"]["calls"] >= 5
    assert not list((notes.parent / "home" / "read").iterdir()), "a complete reading leaves no journal"


def test_the_tree_is_printed_and_written_as_a_page(call: Call, notes: Path, long_folder: Path) -> None:
    page = notes.parent / "tree.html"
    done = call(*_arguments(notes, long_folder, "--tree", "--html", page, "--ask", "Is <script> in it?"))
    assert done.code == 0 and "\nlevel 2, 0-" in done.out and "5 parts of at most 200 tokens" in done.err
    html = page.read_text(encoding="utf-8")
    assert "<h1>Is &lt;script&gt; in it?</h1>" in html and "<script>" not in html and html.count('class="leaf"') == 5


def test_a_short_text_is_one_pass_and_it_says_so(call: Call, notes: Path, long_folder: Path) -> None:
    notes.write_text("The sea is wide.", encoding="utf-8")
    done = call(*_arguments(notes, long_folder))
    assert done.code == 0 and done.err.startswith("the text fits the trained window: one plain pass, no tree\n")


def test_replies_cut_at_the_token_limit_are_marked(call: Call, notes: Path, long_folder: Path) -> None:
    done = call(*_arguments(notes, long_folder, "--tree"))
    assert "(cut at the token limit)" in done.out
    found = json.loads(call(*_arguments(notes, long_folder, "--json")).out)
    leaves = [leaf for leaf in found["tree"]["children"] if leaf["is_cut"]]
    assert found["num_cut"] == len(leaves) + found["tree"]["is_cut"] > 0
    counted = "1 reply" if found["num_cut"] == 1 else f"{found['num_cut']} replies"
    assert f"{counted} cut at the token limit (--max-new-tokens)" in done.err


def test_a_spent_budget_is_told_and_its_journal_stays(call: Call, notes: Path, long_folder: Path) -> None:
    done = call(*_arguments(notes, long_folder, "--budget-calls", 3))
    assert done.code == 0 and "the best answer so far: the budget of calls is spent; unread: 3 parts" in done.err
    more = call(*_arguments(notes, long_folder))
    assert more.code == 0 and "2 calls resumed" in more.err


def test_several_files_are_one_text(call: Call, notes: Path, long_folder: Path) -> None:
    other = notes.with_name("other.txt")
    other.write_text(document(), encoding="utf-8")
    arguments = _arguments(notes, long_folder, "--json")
    done = call(*arguments[:2], other, *arguments[2:])
    assert json.loads(done.out)["tree"]["end"] == 2 * len(document()) + 2


@pytest.mark.parametrize(
    ("content", "more", "told"),
    [
        (None, (), "cannot be read (No such file or directory); name a text file"),
        (b"", (), "is empty; there is nothing to read"),
        (b"\x00\x01\xff", (), "is a binary file, not text"),
        (b"text", ("--ask", "x" * 5000), "the question has 5,000 characters; it stands in every call"),
        (b"text", ("--policy", "nonsense"), '--policy: policy "nonsense"'),
        (b"text", ("--chunk", "0"), '"0" is no number of tokens; write a whole number from 1 on, or auto'),
        (b"text", ("--chunk", "9" * 5000), f'"{"9" * 40}" is no number of tokens; write a whole number'),
        (b"text", ("--budget-calls", "9" * 5000), f'"{"9" * 40}" is no count; write a whole number from 1 on'),
        (b"text", ("--budget-seconds", "nan"), '"nan" is no number of seconds; write one above 0'),
        (b"text", ("--ask", "Who is \udcff?"), "the text is not UTF-8; set the terminal and the shell to UTF-8"),
        (b"text", ("--ask", "Who is {name}?"), "the question names {name}, which is no variable of the context"),
        (b"text", ("--html", "/dev/null"), "/dev/null is a device or a pipe; name a file"),
        (b"text", ("--html", "/nowhere/x.html"), "the folder /nowhere does not exist"),
    ],
)
def test_bad_input_is_one_sentence_before_a_model_is_loaded(
    call: Call, tmp_path: Path, content: bytes | None, more: tuple[str, ...], told: str
) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    done = call("read", path, "--ask", "Who?", "--model", "/no/such/model", *more)
    assert done.code == 2 and told in done.err and done.err.count("\n") == 1


def _wait_for(journal: Path, num_lines: int, process: subprocess.Popen[str]) -> None:
    while not journal.exists() or journal.read_bytes().count(b"\n") < num_lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_reading_that_was_ended_goes_on(
    call: Call, start: Start, notes: Path, long_folder: Path, number: signal.Signals
) -> None:
    notes.write_text(document(120), encoding="utf-8")
    journal = notes.with_name("journal")
    expected = json.loads(call(*_arguments(notes, long_folder, "--json")).out)
    arguments = _arguments(notes, long_folder, "--batch", 1, "--resume", journal)
    process = start(*arguments)
    _wait_for(journal, 4, process)
    process.send_signal(number)
    out, err = process.communicate()
    if number == signal.SIGINT:
        assert process.returncode == 130 and "the same command goes on" in err and "not read" in out
    else:
        assert process.returncode == -signal.SIGKILL
    num_done = journal.read_bytes().count(b"\n") - 1
    found = json.loads(call(*arguments, "--json").out)
    assert 3 <= num_done <= found["num_resumed"] < len(_leaves(expected["tree"]))
    assert found["tree"] == expected["tree"] and found["answer"] == expected["answer"]
    assert found["usage"]["calls"] + found["num_resumed"] == expected["usage"]["calls"]


@pytest.mark.parametrize("more", [("--html", "notes.txt"), ("--resume", "notes.txt"), ("--resume", "x", "--html", "x")])
def test_nothing_is_written_over_what_is_read_or_written(
    call: Call, notes: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    monkeypatch.chdir(notes.parent)
    done = call("read", notes, "--ask", "Who?", "--model", "/no/such/model", *more)
    assert done.code == 2 and "which this command reads or writes already; name another file" in done.err
    assert notes.read_text(encoding="utf-8") == document()


def test_control_characters_of_a_text_do_not_reach_the_terminal(call: Call, notes: Path, long_folder: Path) -> None:
    fact = "Rosa's extension is \x1b]0;owned\x073756"
    notes.write_text(document().replace("Rosa's extension is 3756", fact), encoding="utf-8")
    journal = notes.with_name("journal")
    arguments = _arguments(notes, long_folder, "--resume", journal, "--tree")
    assert call(*arguments).code == 0
    head, *rows = journal.read_text(encoding="utf-8").splitlines()
    said = [json.dumps({**json.loads(row), "reply": fact}) for row in rows]
    journal.write_text("\n".join([head, *said, ""]), encoding="utf-8")
    done = call(*arguments)
    assert "Rosa's extension is \ufffd]0;owned\ufffd3756\n" in done.out
    assert "\x1b" not in done.out + done.err and "\x07" not in done.out + done.err


def test_an_answer_is_not_lost_where_it_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    context = Context(document(50))  # one part under the policy, more than memory holds without it
    with Reader(long_model(2_000_000), context, QUESTION, "keydiff + 4x", max_new_tokens=2) as reader:
        result = reader.read()
        assert result.is_plain and _measured(reader, result, 1) is result
    assert "not measured: a part does not fit into the KV-cache memory" in capsys.readouterr().err
