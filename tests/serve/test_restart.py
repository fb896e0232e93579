"""A server that is started again on the same folder: what was cached is read, for as long as it lives."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.serve.running import TOOL_TEMPLATE, Clock, Running, running, tool_model
from tests.store.common import entry_files

LONG = "the cat sat on the mat and looked at the other cat that sat there " * 3


def ask(server: Running, ttl: str = "5m", question: str = "who?") -> Any:
    marker: Any = {"type": "ephemeral", "ttl": ttl}
    blocks: Any = [{"type": "text", "text": LONG, "cache_control": marker}, {"type": "text", "text": question}]
    return server.anthropic.messages.create(model="tiny", max_tokens=12, messages=[{"role": "user", "content": blocks}])


def counts(found: Any) -> tuple[int, int]:
    return found.usage.cache_read_input_tokens, found.usage.cache_creation_input_tokens


def results(server: Running) -> list[str]:
    """Of lookups."""
    lines = server.service.metrics.text().splitlines()
    return [line for line in lines if line.startswith("kvfold_cache_lookups_total")]


@pytest.mark.parametrize("policy", ["full", "keydiff + 80tok"])
def test_the_first_request_after_a_restart_is_a_hit(tmp_path: Path, policy: str) -> None:
    clock = Clock()
    with running(tool_model(), policy, disk=tmp_path, clock=clock) as server:
        before = ask(server)
        clock.now += 200.0
        assert counts(ask(server))[1] == 0  # makes it live longer
    clock.now += 250.0
    with running(tool_model(), policy, disk=tmp_path, clock=clock) as server:
        after = ask(server)
        assert counts(after) == (counts(before)[1], 0)
        assert after.content[0].text == before.content[0].text
        assert results(server) == ['kvfold_cache_lookups_total{result="hit"} 1']
        clock.now += 299.0
        assert counts(ask(server, question="where?"))[1] == 0


def test_lives_go_on_over_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    with running(tool_model(), disk=tmp_path, clock=clock) as server:
        written = counts(ask(server))[1]
    clock.now += 300.0
    with running(tool_model(), disk=tmp_path, clock=clock) as server:
        assert counts(ask(server, "1h")) == (0, written)
        assert results(server) == ['kvfold_cache_lookups_total{result="expired"} 1']
    clock.now += 3599.0
    with running(tool_model(), disk=tmp_path, clock=clock) as server:
        assert counts(ask(server)) == (written, 0)


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    with running(tool_model(), disk=tmp_path) as server:
        written = counts(ask(server))[1]
    other = tiny.ready("llama", seed=1)
    other.tokenizer.chat_template = TOOL_TEMPLATE
    with running(other, disk=tmp_path) as server:
        assert counts(ask(server)) == (0, written)


def test_a_damaged_entry_is_written_anew(tmp_path: Path) -> None:
    with running(tool_model(), disk=tmp_path) as server:
        written = counts(ask(server))[1]
    for path in entry_files(tmp_path):
        data, stat = path.read_bytes(), path.stat()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        os.utime(path, (stat.st_atime, stat.st_mtime))
    with running(tool_model(), disk=tmp_path) as server:
        assert counts(ask(server)) == (0, written)
    with running(tool_model(), disk=tmp_path) as server:
        assert counts(ask(server)) == (written, 0)
