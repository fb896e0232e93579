"""The operators as torch sees them: what they change, what they return, and what happens without triton."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from kvfold.attend.kernels import ops, reference
from kvfold.errors import InputError
from tests.attend.kernels.common import DEVICE, open_blocks, store

LENS = (40, 0)
BLOCKED = "import sys; sys.modules['triton'] = None\n"  # importing triton now fails as if it were not installed


def run(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.strip()


def test_torch_finds_the_declared_schemas_true() -> None:
    stored = store("int4", "bf16", LENS)
    task, order, task_range = stored.tasks(64)
    q, offset = stored.query()
    common = (q, offset, stored.arena.memory, task, order)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.attend_tasks, (*common, "int4", "bf16", 1, 1, stored.scale), test_utils=tests)
    parts = ops.attend_tasks(*common, "int4", "bf16", 1, 1, stored.scale)
    block = open_blocks(stored, [2], 2)
    torch.library.opcheck(ops.merge_rows, (*parts, task_range, stored.q_RXD, *block.arguments), test_utils=tests)
    row_of_task = torch.zeros(len(task), dtype=torch.int32, device=DEVICE)
    mass = torch.zeros(sum(LENS), device=DEVICE)
    lse_RX = torch.zeros(q.shape[:2], device=DEVICE)
    rest = (lse_RX, row_of_task, "int4", 1, stored.scale, mass)
    torch.library.opcheck(ops.task_mass, (*common, *rest), test_utils=tests)


@pytest.mark.skipif(DEVICE != "cpu", reason="GPUs run the kernels")
def test_a_cpu_runs_the_twins() -> None:
    stored = store("int8", "int8", LENS)
    task, order, _ = stored.tasks(64)
    arguments = (*stored.query(), stored.arena.memory, task, order, "int8", "int8", 1, 1, stored.scale)
    for found, want in zip(ops.attend_tasks(*arguments), reference.attend_tasks(*arguments), strict=True):
        assert found.equal(want)


def test_an_unknown_codec_is_named() -> None:
    stored = store("bf16", "bf16", LENS)
    task, order, _ = stored.tasks(64)
    with pytest.raises(InputError, match='no codec "int3"; they read fp32, fp16, bf16, fp8, int8'):
        ops.attend_tasks(stored.q_RXD, None, stored.arena.memory, task, order, "int3", "bf16", 1, 1, 1.0)


def test_loading_the_operators_imports_no_kernel() -> None:
    program = "import sys, kvfold.attend.kernels.ops; print([m for m in sys.modules if m.endswith('kernels.decode')])"
    assert run(program) == "[]"


def test_operators_load_without_triton_and_tell_its_extra() -> None:
    program = (
        BLOCKED
        + """
from kvfold.attend.kernels import ops
from kvfold.errors import MissingExtra
try:
    ops._kernel("decode")
except MissingExtra as error:
    print(error)
"""
    )
    assert run(program).endswith('pip install "kvfold[gpu]"')
