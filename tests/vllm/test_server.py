"""vLLM's HTTP server, its engine in another process: a client asks a packed document, and two servers share a store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

import kvfold
from kvfold.packed import pack
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.vllm.engine import ROOT, save_tiny, transfer

TEXT = kvfold.example_text()
START_S = 300.0


@contextmanager
def served(model: Path, store: Path) -> Iterator[str]:
    """The URL of a server; its whole process group is ended at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["--model", str(model), "--dtype", "float32", "--enforce-eager", "--port", str(port), "--host", "127.0.0.1"]
    words += ["--max-model-len", "4096", "--kv-transfer-config", json.dumps(transfer(store))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    with (store.parent / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _await(f"http://127.0.0.1:{port}/health", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urlopen(url, timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(1)
    raise RuntimeError("the server did not start")


def post(url: str, **body: Any) -> dict[str, Any]:
    content = json.dumps({"temperature": 0, "max_tokens": 8, "return_token_ids": True, **body}).encode()
    request = Request(f"{url}/v1/completions", content, {"content-type": "application/json"})
    with urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_a_client_asks_a_packed_document_over_http(tmp_path: Path) -> None:
    store = tmp_path / "store"
    folder = save_tiny(tmp_path / "model")
    model = kvfold.load(str(folder), dtype="float32", device="cpu", memory="512MB")
    tier = SharedDiskTier(store)
    packed = pack(model, TEXT, "keydiff + uniform + 4x", tier)
    with kvfold.Session(model, packed.policy) as session:
        session.extend(TEXT)
        expected = session.ask("Who?", max_new_tokens=8).token_ids
    prompt = packed.prompt_token_ids(model.tokenizer, "Who?")
    plain = model.tokenizer(TEXT)["input_ids"]
    with served(folder, store) as url:
        name = str(folder)
        found = post(url, model=name, prompt=prompt, kv_transfer_params=packed.kv_transfer_params)
        packed.check(found["kv_transfer_params"])
        assert found["choices"][0]["token_ids"] == expected
        refused = post(url, model=name, prompt=prompt)
        with pytest.raises(kvfold.errors.InputError, match="names no entry"):
            packed.check(refused["kv_transfer_params"])
        first = post(url, model=name, prompt=plain)
        until = time.monotonic() + 60
        while len(list(tier.keys())) < 1 + (len(plain)) // 128 and time.monotonic() < until:
            time.sleep(0.5)
        with urlopen(f"{url}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
    assert "vllm:kvfold_packed_refusals_total" in metrics and "vllm:kvfold_stored_tokens_total" in metrics
    with served(folder, store) as url:
        again = post(url, model=name, prompt=plain)
        assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        with urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
    loaded = [float(line.split()[-1]) for line in lines if line.startswith("vllm:kvfold_loaded_tokens_total")]
    assert loaded == [len(plain) // 128 * 128]
