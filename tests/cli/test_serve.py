"""`kvfold serve`: options become settings, and the command serves until it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from kvfold.cli.main import build_parser, main
from kvfold.cli.serve import make_settings
from kvfold.serve.auth import key_digest
from tests import tiny

pytest.importorskip("uvicorn")
TWO = ("--replicas", "2", "--kv-events", "tcp://127.0.0.1:5557")


def test_options_become_settings(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret red\n", encoding="utf-8")
    words = ["serve", "--model", "m", "--alias", "claude-fable-5-1", "--keys", str(keys), "--price", "5", "25"]
    found = make_settings(build_parser().parse_args([*words, "--max-body", "1MB", "--timeout", "9"]))
    assert found.names == ("m", "claude-fable-5-1")
    assert found.tenants == {key_digest("secret"): "red"}
    assert found.price is not None
    assert (found.price.input, found.price.output, found.price.read_factor) == (5.0, 25.0, 0.025)
    assert (found.limits.body_bytes, found.limits.request_s) == (1_000_000, 9.0)
    assert (found.min_tokens("m"), found.min_tokens("claude-fable-5-1")) == (1024, 512)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "70000"], "port 70000 does not exist"),
        (["--host", "300.1.1.1"], '--host "300.1.1.1" is no IPv4 address of this machine'),
        (["--host", "192.0.2.1"], '--host "192.0.2.1" is no IPv4 address of this machine'),
        (["--host", "a..b"], '--host "a..b" is no IPv4 address'),
        (["--max-running", "0"], "--max-running is 0; give a number above 0"),
        (["--temperature", "5"], "--temperature is 5; requests take 0 (greedy) to 2"),
        (["--memory", "9999TB"], "GB of this machine; give less"),
        (["--otel", "localhost:4318"], "is no address of a collector"),
        (["--store-form", "zip"], 'no form "zip"; forms: exact, packed, cachegen'),
        (["--store-form", "cachegen"], "cachegen is lossy"),
        (["--store-secret", "nowhere"], "the secret in nowhere cannot be read"),
        (["--redis", "redis://localhost"], "warning: anyone who can write to this Redis server can forge"),
        (["--behind-proxy", "nowhere"], "the secret in nowhere cannot be read"),
        (["--replicas", "65"], "--replicas is 65; give 1 to 64"),
        (["--replicas", "2", "--memory-file", "facts.db"], "--replicas and --memory-file exclude each other"),
        (["--kv-events", "5557"], 'KV events: "5557" is no address; write tcp://127.0.0.1:5557'),
        (["--kv-events", "tcp://1.2.3.400:5557"], 'KV events: "tcp://1.2.3.400:5557" is no address'),
        (
            ["--kv-events", "tcp://*:5557"],
            "the token ids of all prompts; write tcp://127.0.0.1:PORT, or add --kv-eve",
        ),
        (["--kv-events", "tcp://[::]:5557"], "can be read by other machines"),
        (["--kv-events-topic", "kv"], "need --kv-events ADDRESS; add it"),
        ([*TWO, "--kv-events-replay", "tcp://127.0.0.1:5558"], "replay them at 5558 to 5559; choose ports that are 2"),
        ([*TWO, "--kv-events-replay", "tcp://127.0.0.1:65535"], "need 2 ports, one for each replica, up to 65535"),
        (["--kv-events", "tcp://127.0.0.1:0"], "KV events at port 0 would be at any free one"),
        (["--kv-events", "tcp://127.0.0.1:65536"], "KV events need a port up to 65535; choose a lower number"),
        (["--kv-events", "tcp://127.0.0.1:9", "--kv-events-replay", "tcp://127.0.0.1:9"], "at the same port 9; choose"),
        (["--kv-events", "ipc:///nowhere/at/all"], "KV events cannot be published at ipc:///nowhere/at/all"),
        (["--engine", "http://x", "--disk", "d"], "--engine and --disk exclude each other"),
        (["--engine", "http://x", "--replicas", "2"], "--engine and --replicas exclude each other"),
        (["--engine", "http://x", "--dtype", "float32"], "--policy full packs nothing and loads no model here"),
        (["--engine", "http://x", "--policy", "keydiff + uniform + 4x"], "give --engine-store, where its connector"),
        (["--engine", "http://x", "--policy", "int4"], "evicts nothing"),
        (["--engine", "x/?y"], "no address of a server"),
        (["--engine", "http://127.0.0.1:9"], "the engine does not answer (ConnectionRefusedError"),
        (["--engine-key", "key"], "--engine-key is for --engine URL"),
        (["--keys", "nowhere"], "the API keys in nowhere cannot be read"),
        (["--policy", "snapkv + int3"], "int3"),
    ],
)
def test_bad_options_are_told_before_a_model_is_loaded(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "does-not-exist", "--port", "0", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-body", "10"], "10 is too little for a request; give 1KB or more"),
        (["--disk-size", "0"], "0 is too little for cached prompts; give 1MB or more"),
        (["--host-memory", "1KB"], "1KB is too little for cached prompts"),
        (["--cache-min-tokens", "0"], '"0" is no count; write a whole number from 1 on'),
    ],
)
def test_sizes_that_nothing_fits_into_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *words])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--keys", "a", "--behind-proxy", "b"],
        ["--replicas", "65"],
        ["--engine", "http://x", "--disk", "d"],
        ["--kv-events", "5557"],
        ["--keys", "nowhere"],
    ],
)
def test_options_that_exclude_each_other_are_refused_before_torch_is_imported(words: list[str]) -> None:
    lines = "import sys; from kvfold.cli.main import main; sys.exit(main(sys.argv[1:]) != 2 or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", lines, "serve", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("error: ")


def test_a_port_in_use_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", "--model", "does-not-exist", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_without_the_extra_the_command_to_install_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "kvfold.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve", "--model", "does-not-exist", "--port", "0"]) == 2
    assert "the server needs uvicorn; run: pip install 'kvfold[serve]'" in capsys.readouterr().err


def test_without_zeromq_the_command_to_install_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "kvfold.store.kv_events.publisher", raising=False)
    monkeypatch.setitem(sys.modules, "zmq", None)
    assert main(["serve", "--model", "does-not-exist", "--port", "0", "--kv-events", "ipc:///tmp/events"]) == 2
    assert "KV events need zmq; run: pip install 'kvfold[events]'" in capsys.readouterr().err


def test_the_command_serves_until_it_is_interrupted_and_logs_json_alone(tmp_path: Path) -> None:
    """Also while it loads, of which it tells every 50 ms here."""
    folder = tmp_path / "tiny"
    tiny.build("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    words = ["serve", "--model", str(folder), "--port", "0", "--memory", "64MB", "--host-memory", "16MB"]
    words += ["--disk", str(tmp_path / "disk"), "--disk-size", "16MB", "--log", "json"]
    words += ["--store-form", "packed"]
    often = "import sys; from kvfold.models.pull import progress; progress.LINE_EVERY_S = 0.05; "
    command = [sys.executable, "-c", f"{often}from kvfold.cli.main import main; sys.exit(main(sys.argv[1:]))", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        started = json.loads(server.stdout.readline())
        with urlopen(f"{started['url']}/health", timeout=60) as answer:
            health = json.load(answer)
            assert (health["status"], health["model"]) == ("ok", "tiny")
    finally:
        server.send_signal(signal.SIGINT)
        out, errors = server.communicate(timeout=60)
    assert server.returncode in (0, 130), errors
    assert (out, started["event"], started["model"], started["policy"]) == ("", "serving", "tiny", "full")
    lines = [json.loads(line) for line in errors.splitlines()]
    assert lines[0]["event"] == "loading tiny, policy full"
    assert lines[1]["event"].startswith(f"load {folder}, ")
    assert lines[-1]["event"] == "stopped"
    assert [line["path"] for line in lines if line["event"] == "answered"] == ["/health"]
