"""Under `--log json` every line is a JSON object, whoever prints it."""

from __future__ import annotations

import io
import json
import sys
import threading

import pytest

from kvfold.cli.main import main
from kvfold.models.pull.progress import PlainProgress
from kvfold.serve.ops.json_output import JsonStream, json_line, json_output


def _events(text: str) -> list[tuple[str, str]]:
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(line["time"] for line in lines)
    return [(line["level"], line["event"]) for line in lines]


def test_what_is_printed_becomes_events(capsys: pytest.CaptureFixture[str]) -> None:
    with json_output():
        print("prompts are not cached: ü \U0001f426")
        PlainProgress()("load tiny", 0, None)
        print("warning: sign entries", file=sys.stderr)
        print("error: no such model\n\n1%\r2%", file=sys.stderr, end="")
    out, err = capsys.readouterr()
    assert _events(out) == [("info", "prompts are not cached: ü \U0001f426")]
    assert out.isascii()
    first, second, *others = _events(err)
    assert (first, second) == (("info", "load tiny"), ("warning", "sign entries"))
    assert others == [("error", "no such model"), ("info", "1%"), ("info", "2%")]


def test_objects_stay_and_other_json_does_not() -> None:
    stream = io.StringIO()
    line = json_line("serving", url="http://127.0.0.1:1")
    print(f'{line}\n[1]\n"text"\n{{broken', file=JsonStream(stream))
    first, *others = stream.getvalue().splitlines()
    assert first == line and json.loads(line)["url"] == "http://127.0.0.1:1"
    assert [json.loads(other)["event"] for other in others] == ["[1]", '"text"', "{broken"]


def test_lines_of_threads_do_not_mix() -> None:
    stream = io.StringIO()
    shared, begun, done = JsonStream(stream), threading.Event(), threading.Event()

    def first() -> None:
        shared.write("the first ")
        begun.set()
        done.wait()
        shared.write("line\n")

    thread = threading.Thread(target=first)
    thread.start()
    begun.wait()
    shared.write("the second line\nthe ")
    done.set()
    thread.join()
    shared.end()
    assert [event for _, event in _events(stream.getvalue())] == ["the second line", "the first line", "the "]


def test_a_failure_is_one_line_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught, json_output():
        raise RuntimeError("broken")
    line = json.loads(capsys.readouterr().err)
    assert (caught.value.code, line["level"], line["event"]) == (1, "error", "failed")
    assert line["error"].endswith("RuntimeError: broken\n") and "Traceback" in line["error"]


def test_a_refusal_of_the_command_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("uvicorn")
    words = ["serve", "--log", "json", "--model", "does-not-exist", "--port", "0", "--redis", "redis://localhost"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    (warned, sign), (_, loading), (failed, reason) = _events(err)
    assert (out, warned, failed) == ("", "warning", "error")
    assert loading == "loading does-not-exist, policy full"
    assert "--store-secret" in sign and 'no model "does-not-exist"' in reason
