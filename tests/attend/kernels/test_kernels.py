"""The Triton kernels against their torch twins: on a GPU, or in triton's interpreter.

Queries in fp32 make both compute the same numbers but for rounding, so a wrong index cannot hide in a tolerance; bf16
is compared as loosely as its mantissa demands.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvfold.attend.kernels import reference
from kvfold.attend.kernels.formats import LENGTH, format_of
from kvfold.codec import Int2, Int4, Int8, Side
from kvfold.errors import InputError
from tests.attend.kernels.common import CODECS, DEVICE, Stored, open_blocks, store

decode = pytest.importorskip("kvfold.attend.kernels.decode", reason="triton is not installed")
mass = pytest.importorskip("kvfold.attend.kernels.mass", reason="triton is not installed")
merge = pytest.importorskip("kvfold.attend.kernels.merge", reason="triton is not installed")

LENS = (100, 1, 0, 47)
SIDES: tuple[Side, ...] = ("k", "v")
TIGHT: dict[str, Any] = {"atol": 2e-4, "rtol": 1e-4}
LOOSE: dict[str, Any] = {"atol": 8e-2, "rtol": 2e-2}
CONFIG = decode.Config(32, 4, 2)  # small tiles: whole ones and a rest within a hundred slots


def attend_arguments(stored: Stored, split: int = 128) -> tuple[tuple[Any, ...], int, Tensor]:
    """What both take, the number of tasks, and the tasks of each head."""
    task, order, task_range = stored.tasks(split)
    arguments = (*stored.query(), stored.arena.memory, task, order, *stored.names, *stored.groups, stored.scale)
    return (*arguments, stored.bias is not None), len(order), task_range


def assert_attends_alike(stored: Stored, tolerance: dict[str, Any], split: int = 128) -> None:
    arguments, num_tasks, _ = attend_arguments(stored, split)
    found = decode.launch(*arguments, config=CONFIG)
    want = reference.attend_tasks(*arguments)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a[:num_tasks], b[:num_tasks], **tolerance)


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec(codec: str) -> None:
    assert_attends_alike(store(codec, codec, LENS, dtype=torch.float32), TIGHT)


@pytest.mark.parametrize("codec", ["bf16", "fp8", "int8", "int4", "int2"])
def test_every_codec_in_bf16(codec: str) -> None:
    assert_attends_alike(store(codec, codec, (65,)), LOOSE)


@pytest.mark.parametrize(
    ("head_dim", "num_queries", "codecs"),
    [(96, 1, ("int4", "int2")), (128, 16, ("int2", "bf16")), (256, 3, ("fp8", "int4")), (80, 20, ("kivi4", "int8"))],
)
def test_odd_shapes_and_mixed_sides(head_dim: int, num_queries: int, codecs: tuple[str, str]) -> None:
    stored = store(*codecs, (33, 16), head_dim=head_dim, num_queries=num_queries, dtype=torch.float32)
    assert_attends_alike(stored, TIGHT)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 64])
def test_lengths_about_a_tile(length: int) -> None:
    assert_attends_alike(store("int4", "int4", (length,), dtype=torch.float32), TIGHT)


def test_groups_of_channels_that_cut_across_the_parts_of_a_byte() -> None:
    for codec, name in ((Int4(group_size=32), "int4"), (Int2(group_size=48), "int2"), (Int8(group_size=16), "int8")):
        stored = store(name, name, (35,), head_dim=96, codecs=(codec, codec), dtype=torch.float32)
        assert stored.groups[0] > 1
        assert_attends_alike(stored, TIGHT)


def test_codes_that_end_within_a_word_are_refused() -> None:
    with pytest.raises(InputError, match="multiples of 4"):
        format_of("int4").num_words(66)


def test_biases_and_splits() -> None:
    assert_attends_alike(store("int8", "fp8", (100, 3), with_bias=True, dtype=torch.float32), TIGHT, split=32)


def test_a_task_of_no_slots_and_a_table_without_order() -> None:
    stored = store("bf16", "bf16", (40, 40), dtype=torch.float32)
    (q, offset, memory, task, _, *rest), num_tasks, _ = attend_arguments(stored)
    task[num_tasks:] = 0
    found = decode.launch(q, offset, memory, task, None, *rest, config=CONFIG)
    want = reference.attend_tasks(q, offset, memory, task, None, *rest)
    torch.testing.assert_close(found[0][:num_tasks], want[0][:num_tasks], **TIGHT)


@pytest.mark.parametrize(("codec", "skip"), [("bf16", 5), ("fp8", 15), ("int4", 5), ("int4", 15), ("kivi4", 15)])
def test_slots_of_others_at_the_front_are_skipped(codec: str, skip: int) -> None:
    stored = store(codec, codec, LENS, dtype=torch.float32)
    arguments, num_tasks, _ = attend_arguments(stored, 64)
    task, *_ = stored.tasks(64, skip=skip)
    arguments = (*arguments[:3], task, *arguments[4:], True)
    found, want = decode.launch(*arguments, config=CONFIG), reference.attend_tasks(*arguments)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a[:num_tasks], b[:num_tasks], **TIGHT)
    q_RXD, offset_RX = stored.query()
    k_SD, v_SD = (stored.decoded(side, 0)[skip : int(task[0, LENGTH])] for side in SIDES)
    score_XS = q_RXD[0].float() @ k_SD.T
    score_XS = (score_XS if offset_RX is None else score_XS + offset_RX[0].unsqueeze(-1)) * stored.scale
    torch.testing.assert_close(found[0][0], score_XS.softmax(-1) @ v_SD, **TIGHT)


@pytest.mark.parametrize(
    ("num_new", "fill", "dtype", "open_len", "sink_len", "num_outputs"),
    [
        (1, (0, 7), "bf16", 8, 4, 32),
        (3, (40, -1), "fp32", 64, 0, 128),
        (5, (2, 0), "fp16", 8, 3, 512),
        (4, (6, -1), "bf16", 8, 0, 2048),
    ],
)
def test_merged_rows(
    num_new: int, fill: tuple[int, int], dtype: str, open_len: int, sink_len: int, num_outputs: int
) -> None:
    """Lanes of two heads each: full, single, no tasks at all; drafts; an empty lane; a draft past the end; exact
    slots in one lane."""
    stored = store("int4", "int4", LENS, num_queries=2 * num_new, head_dim=96, dtype=torch.float32)
    arguments, _, task_range = attend_arguments(stored, 32)
    parts = reference.attend_tasks(*arguments)
    block = open_blocks(stored, fill, num_new, open_len=open_len, sink_len=sink_len, dtype=dtype)
    before = stored.arena.memory.clone()
    want = reference.merge_rows(*parts, task_range, stored.q_RXD, *block.arguments)
    memory = stored.arena.memory.clone()
    stored.arena.memory.copy_(before)
    shape = merge.choose_shape(num_outputs, 64, 128)
    found = merge.launch(*parts, task_range, stored.q_RXD, *block.arguments, shape)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, **TIGHT)
    assert stored.arena.memory.equal(memory)


@pytest.mark.parametrize("codec", ["bf16", "int4", "kivi2"])
def test_mass(codec: str) -> None:
    stored = store(codec, codec, LENS, with_bias=codec == "int4", dtype=torch.float32)
    arguments, _, _ = attend_arguments(stored, 64)
    q, offset, memory, task, order = arguments[:5]
    lse_RX = torch.randn(len(LENS) + 1, 4, device=DEVICE) + 6
    row_of_task = (task[:, 0].clamp(min=0) + 1).to(torch.int32)  # rows of output need not be rows of q
    totals = [torch.ones(sum(LENS), device=DEVICE) for _ in range(2)]
    for run, total in zip((mass.launch, reference.task_mass), totals, strict=True):
        rest = (lse_RX, row_of_task, codec, stored.groups[0], stored.scale, total, stored.bias is not None)
        run(q, offset, memory, task, order, *rest)
    assert totals[1].gt(1).all()
    torch.testing.assert_close(totals[0], totals[1], atol=1e-4, rtol=1e-3)


def test_mass_leaves_skipped_slots_and_lanes_that_saw_nothing_alone() -> None:
    stored = store("int8", "int8", (40, 40), dtype=torch.float32)
    q, offset = stored.query()
    task, order, _ = stored.tasks(64, skip=7)
    lse_RX = torch.full((2, 4), 6.0, device=DEVICE)
    lse_RX[1] = -torch.inf
    totals = [torch.zeros(80, device=DEVICE) for _ in range(2)]
    for run, total in zip((mass.launch, reference.task_mass), totals, strict=True):
        rest = (lse_RX, task[:, 0].to(torch.int32), "int8", 1, stored.scale, total, False, True)
        run(q, offset, stored.arena.memory, task, order, *rest)
    torch.testing.assert_close(totals[0], totals[1], atol=1e-4, rtol=1e-3)
    assert totals[0].gt(0).nonzero().squeeze(-1).tolist() == [*range(7, 40)]
