"""The load on a server: a short run against a real one, and the section of docs that is made of it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.serve_load import load, page
from benchmarks.served import served
from tests import tiny

pytest.importorskip("uvicorn")


def test_a_short_load_leaves_nothing_behind(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    args = argparse.Namespace(clients=3, minutes=0.03, documents=2, document=100, reply=8)
    options = ("--memory", "64MB", "--host-memory", "16MB", "--cache-min-tokens", "32")
    with served(str(tmp_path / "model"), *options) as server:
        found = load(args, server)
        refused = server.ask({**server.body([], 1), "fly": True})
    assert refused.status == 400
    assert set(found["statuses"]) <= {"200", "hung up"} and found["statuses"]["200"] >= 3
    assert found["leaked_bytes"] == 0 and found["after"]["running"] == 0
    assert 0 < found["first_s"]["p50"] <= found["first_s"]["p99"]
    about = {"model": "tiny", "options": ["--memory", "64MB"], "device": "CPU", "threads": 1}
    text = page({**found, **about, **vars(args), "commit": "c", "date": "d"})
    asked = "--model tiny --clients 3 --minutes 0.03 --documents 2 --document 100 --reply 8 -- --memory 64MB"
    assert f"\npython benchmarks/serve_load.py {asked}\n" in text
    assert f"| answers by status | {found['statuses']['200']} x 200" in text
    assert "| bytes of the arena that leaked | 0 |" in text
