"""What is printed of a run with replicas, and the balance of the hash by itself."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest

from benchmarks.server.replicas import children, cpu_ms, openings, share_by_hash, show

FOUND = {
    "hit_rate_one": 0.79, "hit_rate_replicas": 0.77, "shares": [0.45, 0.55], "conversations_on_one": 40,
    "sets_within_bounds": 0.8, "added_ms": 1.5, "added_ms_batches": [1.5], "one_ms": 3.0,
    "proxy_ms": 4.5, "proxy_cpu_ms": 1.25,
    "kill_requests": 60, "kill_failed": 1, "kill_retries": 2,
}  # fmt: skip


def test_targets_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(FOUND, 40) == {"hit rate": False, "share": True, "added ms": True, "failed": False}
    assert not show({**FOUND, "added_ms": 0.1, "proxy_cpu_ms": 2.3}, 40)["added ms"], "noise is no speed"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["hit", "rate", "missed", "77.0%", "of", "79.0%", "with", "one", "server"]
    assert lines[3].split() == ["failed", "missed", "1", "of", "60,", "2", "tried", "again"]


def test_most_sets_of_conversations_are_balanced_and_large_ones_all() -> None:
    assert share_by_hash(argparse.Namespace(seed=0, conversations=40), sets=100) > 0.6
    assert share_by_hash(argparse.Namespace(seed=0, conversations=1000), sets=20) == 1


def test_conversations_are_those_of_the_seed() -> None:
    assert openings(1, 3) == openings(1, 3) != openings(2, 3)


def test_children_are_found_and_timed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert process.pid in children(os.getpid())
        assert cpu_ms(process.pid) >= 0
        process.communicate(b"\n")
