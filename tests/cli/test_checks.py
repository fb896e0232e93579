"""Arguments and files are checked before a model is looked for: no test here has one. Each refusal is one line."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Call

NO_MODEL = ("--model", "no-such-model")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The sea is wide.", encoding="utf-8")
    return path


def refused(call: Call, *arguments: object) -> str:
    done = call(*arguments, *NO_MODEL)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done
    assert done.err.startswith("error: ") and "no-such-model" not in done.err
    return done.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--memory", "lots"), 'argument --memory: "lots" is no amount of memory'),
        (("--memory", "1KB"), "argument --memory: 1KB is too little for any KV cache; give 64KiB or more"),
        (("--max-new-tokens", "-3"), 'argument --max-new-tokens: "-3" is no count; write a whole number from 1 on'),
        (("--ask", ""), "argument --ask: the text is empty"),
        (("--ask", " "), "argument --ask: the text is empty"),
        (("--stop", ""), "argument --stop: the text is empty"),
        (("--seed", 2**64), "is no seed"),
        (("--temperature", "-1"), "temperature is -1.0; it must be 0"),
        (("--top-p", "2"), "top_p is 2.0"),
        (("--speculate", "0"), 'argument --speculate: "0" is no count'),
        (("--policy", "int3"), '--policy: policy "int3": no codec "int3"'),
        (("--compare", "int4,,snap"), 'argument --compare: "int4,,snap" has a comma without a policy beside it'),
        (("--compare", "int4,snap"), '--compare: policy "snap"'),
        (("--device", "abacus"), 'argument --device: no device "abacus"'),
        (("--device", "cuda:99"), 'argument --device: "cuda:99" is not here'),
        (("--dtype", "int3"), "argument --dtype: invalid choice"),
        (("--fly",), "unrecognized arguments: --fly"),
        (("--import", "x.py"), "--import comes before the command: kvfold --import MODULE COMMAND"),
    ],
)
def test_bad_options_of_run(call: Call, text: Path, arguments: tuple[object, ...], told: str) -> None:
    assert told in refused(call, "run", "--context", text, "--ask", "why?", *arguments)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty; there is nothing to read"),
        (b" \n\t\n", "is empty; there is nothing to read"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is a binary file, not text"),
        (b"plain\0bytes", "is a binary file, not text"),
        ("Gr\u00fc\u00dfe".encode("utf-16"), "is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
        ("Gr\u00fc\u00dfe".encode("latin-1"), "is not UTF-8, perhaps Windows-1252 or Latin-1; convert it: iconv -f"),
    ],
)  # fmt: skip
def test_bad_texts_of_every_command(call: Call, tmp_path: Path, content: bytes, told: str) -> None:
    path, out = tmp_path / "text", ("--out", tmp_path / "out")
    path.write_bytes(content)
    assert told in refused(call, "run", "--context", path, "--ask", "why?")
    assert told in refused(call, "fit-prompt", path, *out)
    for command in ("train-scorer", "profile", "calibrate"):
        assert told in refused(call, command, "--text", path, *out)
    assert told in refused(call, "bench", "--haystack", path)


def test_missing_files_of_every_command(call: Call, text: Path, tmp_path: Path) -> None:
    gone, out = tmp_path / "gone", ("--out", tmp_path / "out")
    for arguments in (
        ("run", "--ask", "why?", "--context", gone),
        ("fit-prompt", gone, *out),
        ("train-scorer", "--text", gone, *out),
        ("profile", "--text", gone, *out),
        ("bench", "--haystack", gone),
        ("bench", "--sizes", gone),
    ):
        assert f"{gone} cannot be read (No such file or directory)" in refused(call, *arguments)
    assert "Is a directory" in refused(call, "run", "--ask", "why?", "--context", tmp_path)
    assert f"--prefix: there is no file {gone}" in refused(call, "chat", "--prefix", gone)
    for command in (("fit-prompt", text), ("train-scorer",), ("profile",), ("calibrate",)):
        assert "does not exist" in refused(call, *command, "--out", gone / "out")
        assert "is a folder; name a file" in refused(call, *command, "--out", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("chat", "--policy", "int3"), '--policy: policy "int3"'),
        (("chat", "--max-new-tokens", "0"), "argument --max-new-tokens"),
        (("serve", "--memory", "lots"), "argument --memory"),
        (("serve", "--host-memory", "lots"), "argument --host-memory"),
        (("serve", "--disk-size", "-1"), "argument --disk-size"),
        (("serve", "--alias", ""), "argument --alias"),
        (("demo", "--memory", "lots"), "argument --memory"),
        (("bench", "--arena", "lots"), "argument --arena"),
        (("bench", "--policies", "int4,,snapkv"), "argument --policies"),
        (("train-scorer", "--out", "x", "--teacher", "keydiff"), "does not read a text twice"),
        (("profile", "--out", "x", "--loss", "1"), "--loss is 1; the loss is a share"),
        (("calibrate", "--out", "x", "--heads", "0"), "argument --heads"),
        (("cache", "explain", "x", "--cache-min-tokens", "-1"), "argument --cache-min-tokens"),
    ],
)
def test_bad_options_of_other_commands(call: Call, arguments: tuple[str, ...], told: str) -> None:
    if arguments[0] == "serve":
        pytest.importorskip("uvicorn")
    assert told in refused(call, *arguments)


def test_a_port_in_use_is_told_first(call: Call) -> None:
    pytest.importorskip("uvicorn")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen at 127.0.0.1:{port}" in refused(call, "serve", "--port", port)


def test_stdin_is_checked_like_a_file(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    assert "stdin is UTF-16" in refused(call, "run", "--context", "-", "--ask", "why?")


def test_no_command_writes_over_what_it_reads(call: Call, text: Path, tmp_path: Path) -> None:
    """Whatever the file is called: by another way to its folder, or by a link."""
    link, before = tmp_path / "link", text.read_bytes()
    link.symlink_to(text)
    run = tmp_path / "run"
    run.mkdir()
    (run / "rows.jsonl").touch()
    for out in (text, tmp_path / "." / "run" / ".." / text.name, link):
        for arguments in (
            ("train-scorer", "--labels", text),
            *((command, "--text", text) for command in ("train-scorer", "profile", "calibrate")),
            ("fit-prompt", text),
            ("label", text),
            ("pack", text, "--store", tmp_path / "store", "--policy", "keydiff + 2x"),
        ):
            assert "is a file that this command reads" in refused(call, *arguments, "--out", out), arguments
        assert "is a file that this command reads" in call("shorten", text, "--to", "2x", "--html", out).err
    assert "is a file that this command reads" in call("report", run, "--out", run / "rows.jsonl").err
    assert text.read_bytes() == before
