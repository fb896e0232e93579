"""The load on a server: a short run against a real one, and the section of docs that is made of it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.server import hostile
from benchmarks.server.client import served
from benchmarks.server.hostile import KEY, KINDS, Hostile
from benchmarks.server.load import load, page, write_keys

pytest.importorskip("uvicorn")


def test_a_short_load_leaves_nothing_behind(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "_PATIENCE_S", 1.0)
    args = argparse.Namespace(clients=3, minutes=0.03, documents=2, document=100, reply=8, tenants=2, hostile=0.3)
    write_keys(tmp_path / "keys", 2)
    options = ("--memory", "64MB", "--host-memory", "16MB", "--cache-min-tokens", "32", "--keys", f"{tmp_path}/keys")
    with served(str(tiny_llama), *options) as process:
        server = process.as_tenant("key-0")
        found = load(args, server)
        refused = server.ask({**server.body([], 1), "fly": True})
        client = Hostile(server.port, server.model, KEY)
        quick = [kind for kind in KINDS if kind not in ("slow headers", "slow body", "never reads", "long body")]
        outcomes = {kind: KINDS[kind](client) for kind in quick}
    assert refused.status == 400
    taken = {kind for kind, outcome in outcomes.items() if outcome == "200"}
    assert taken <= {"tiny temperature", "control tokens"}
    assert all(outcome in ("200", "hung up") or 400 <= int(outcome) < 500 for outcome in outcomes.values()), outcomes
    assert found["num_hostile"] >= sum(map(len, found["hostile_outcomes"].values()))
    assert set(found["statuses"]) <= {"200", "hung up"} and found["statuses"]["200"] >= 3
    assert found["leaked_bytes"] == 0 and found["after"]["running"] == 0
    assert 0 < found["first_s"]["p50"] <= found["first_s"]["p99"]
    about = {"model": "tiny", "options": ["--memory", "64MB"], "device": "CPU", "threads": 1}
    text = page({**found, **about, **vars(args), "commit": "c", "date": "d"})
    asked = "--model tiny --clients 3 --minutes 0.03 --documents 2 --document 100 --reply 8 --tenants 2 --hostile 0.3"
    assert f"\npython -m benchmarks.server load {asked} -- --memory 64MB\n" in text
    assert f"| answers by status | {found['statuses']['200']} x 200" in text
    assert "| bytes of the arena that leaked | 0 |" in text
