"""Compiled decode attention on a CPU: what PyTorch reads, from every form of pages, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch

from kvfold.pages.arena import Arena
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from tests.attend.reference import part
from tests.pages.tiny import SMALL_BLOCK, new_sequence, prefill, random_layers, tiny_spec
from tests.passes.batches import assert_batch_reads_as_alone

pytest.importorskip("numba")

from kvfold.passes.cpu_step import CpuStep

SMALL = "20tok + protect(sinks=1, recent=2)"
COMPILED = (
    "full", "full + bf16", "full + fp8", "full + int8", "full + int4", "full + int2", f"h2o + ada + {SMALL}",
    "knorm + global + 2x + protect(sinks=4, recent=2) + int4", "knorm + 2x + protect(sinks=1, recent=2) + fit + int8",
)  # fmt: skip
IN_TORCH = (f"streaming + slot + {SMALL}", "full + quest(tokens=4, skip_layers=0)", "full + kivi4")
LENGTHS = (61, 5, 40, 52, 23, 44, 58, 13, 47, 36, 50, 31)


def batch_of(
    policies: tuple[str, ...], kv_dtype: torch.dtype, head_dim: int = 16
) -> tuple[list[SequenceCache], list[SequenceCache]]:
    """Sequences of one arena, and the same, each in its own."""
    spec = tiny_spec(num_layers=3, num_heads=3, head_dim=head_dim, sliding={2: 30}, kv_dtype=kv_dtype)
    layers, arena = random_layers(spec, 80), Arena(16 << 20, superblock_bytes=SMALL_BLOCK)
    found: tuple[list[SequenceCache], list[SequenceCache]] = [], []
    for policy, length in zip(policies, LENGTHS, strict=False):
        for sequences, mine in zip(found, (arena, None), strict=True):
            sequences.append(new_sequence(policy, spec, arena=mine))
            prefill(sequences[-1], part(layers, 0, length))
            sequences[-1].fork()  # what follows goes to another segment
    return found


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policies", [COMPILED, COMPILED + IN_TORCH], ids=["compiled", "mixed"])
def test_a_batch_reads_what_torch_reads(policies: tuple[str, ...], kv_dtype: torch.dtype) -> None:
    batch, alone = batch_of(policies, kv_dtype)
    compiled = CpuStep.over(batch)
    assert compiled is not None and compiled.indices == list(range(len(COMPILED)))
    assert compiled.serves(0) and not compiled.serves(2)
    assert_batch_reads_as_alone(batch, alone, random_layers(batch[0].spec, 80))


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_heads_that_fill_registers_are_read_as_torch_reads_them(head_dim: int, kv_dtype: torch.dtype) -> None:
    """By kernels for AVX-512 where a machine has it; with codes and floats in one batch."""
    batch, alone = batch_of(COMPILED, kv_dtype, head_dim)
    assert_batch_reads_as_alone(batch, alone, random_layers(batch[0].spec, 80))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_share_long_rows(num_threads: int) -> None:
    """A row of several tasks, shared out among threads; the same bits by any number of them, and alone."""
    spec = tiny_spec(num_heads=2, head_dim=24)  # rotated in blocks of 8
    layers, arena = random_layers(spec, 1300), Arena(16 << 20, superblock_bytes=SMALL_BLOCK)
    batch = [new_sequence(policy, spec, arena=arena, open_len=32) for policy in ("full", "full + int4")]
    expected = [new_sequence(policy, spec, open_len=32) for policy in ("full", "full + int4")]
    for sequence, length in zip(batch + expected, (1200, 900) * 2, strict=True):
        prefill(sequence, part(layers, 0, length))
    before, outs = torch.get_num_threads(), []
    try:
        torch.set_num_threads(num_threads)
        for sequences in (batch, batch[1:]):
            step = DecodePass.begin(sequences)
            new = (x[:, 1250:1251].expand(-1, len(sequences), -1) for x in layers[1])
            outs.append(step.attend_packed(1, *new))  # not finished: the next step writes the same slots
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(outs[0][1], outs[1][0], rtol=0, atol=0)
    for index, sequence in enumerate(expected):
        new = (x[:, 1250:1251] for x in layers[1])
        plain_QTD = DecodePass.begin([sequence]).attend(1, 0, *new)
        torch.testing.assert_close(outs[0][index], plain_QTD[:, 0], atol=1e-5, rtol=1e-4)


def test_a_broken_row_breaks_no_other() -> None:
    spec = tiny_spec()
    layers, arena = random_layers(spec, 40), Arena(4 << 20, superblock_bytes=SMALL_BLOCK)
    batch = [new_sequence("full", spec, arena=arena) for _ in range(2)]
    for sequence, length in zip(batch, (30, 20), strict=True):
        prefill(sequence, part(layers, 0, length))
    for broken in (torch.nan, torch.inf):
        step = DecodePass.begin(batch)
        for i, qkv in enumerate(layers):
            q, k, v = (x[:, 30:31].expand(-1, 2, -1).clone() for x in qkv)
            k[:, 0] = v[:, 0] = broken
            found_NQD = step.attend_packed(i, q, k, v)
            assert not found_NQD[0].isfinite().any() and found_NQD[1].isfinite().all()
        step.finish()
