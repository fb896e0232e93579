"""No request waits for a compiler: what serving takes is compiled before a server takes requests."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvfold.core import HAS_NUMBA
from kvfold.engine.runner import Runner
from kvfold.engine.warm_up import warm_up
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from tests import tiny


@pytest.mark.skipif(not HAS_NUMBA, reason="numba is not installed")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["full", "keydiff + 4x + int4"])
def test_requests_compile_nothing(policy: str, dtype: str) -> None:
    command = [sys.executable, "-m", "tests.serve.compiling", policy, dtype]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert any(found["after"].values())
    assert found["before"] == found["after"]


@pytest.mark.parametrize("policy", ["full", "snapkv + 16tok", "keydiff + 4x + int2", "kvzip + 4x", "full + kivi2"])
def test_the_arena_is_as_before(model: Model, policy: str) -> None:
    warm_up(Runner(model.hf, model.spec, model.arena, joins=True), Policy.parse(policy), 64)
    assert model.arena.used_bytes == 0


def test_an_arena_without_room_ends_it_early() -> None:
    model = tiny.ready("llama", capacity=3 * 4096)
    warm_up(Runner(model.hf, model.spec, model.arena, joins=True), Policy.parse("full"), 64)
    assert model.arena.used_bytes == 0
