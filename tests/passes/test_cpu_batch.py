"""Rows of a step that are read together: as alone, whatever stands beside them."""

from __future__ import annotations

import pytest
import torch

from kvfold.pages.sequence import SequenceCache
from kvfold.passes.cpu_batch import grouped, row_of
from kvfold.passes.decode import DecodePass
from tests.attend.reference import part
from tests.pages.tiny import new_sequence, prefill, random_layers, tiny_spec
from tests.passes.batches import assert_batch_reads_as_alone

SMALL = "20tok + protect(sinks=1, recent=2)"
JOINED = ("full", "full + bf16", f"h2o + ada + {SMALL}", "knorm + global + 2x + protect(sinks=1, recent=2)")
APART = ("full + int8", f"streaming + slot + {SMALL}", "full + quest(tokens=4, skip_layers=0)")
LENGTHS = (61, 5, 40, 52, 23, 44, 58, 13)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16])
def test_packed_rows_are_read_as_alone(kv_dtype: torch.dtype) -> None:
    spec = tiny_spec(num_layers=3, num_heads=3, sliding={2: 30}, kv_dtype=kv_dtype)
    layers = random_layers(spec, 80)
    policies = [*JOINED, *APART, "full"]

    def read(index: int) -> SequenceCache:
        sequence = new_sequence(policies[index], spec)
        prefill(sequence, part(layers, 0, LENGTHS[index]))
        sequence.fork()  # what follows goes to another segment, with heads that have unequal lengths already
        return sequence

    alone = [read(index) for index in range(len(policies))]
    batch = [read(index) for index in range(len(policies))]
    assert [row_of(sequence, 0) is not None for sequence in batch] == [True] * 4 + [False] * 3 + [True]
    assert [row_of(sequence, 2) is not None for sequence in batch] == [length < 30 for length in LENGTHS]
    assert_batch_reads_as_alone(batch, alone, layers)


def test_a_broken_row_breaks_no_other() -> None:
    spec = tiny_spec()
    layers = random_layers(spec, 40)
    batch = [new_sequence("full", spec) for _ in range(2)]
    for sequence, length in zip(batch, (30, 20), strict=True):
        prefill(sequence, part(layers, 0, length))
    for at in (30, 31):
        step = DecodePass.begin(batch)
        for i, qkv in enumerate(layers):
            q, k, v = (x[:, at : at + 1].expand(-1, 2, -1).clone() for x in qkv)
            k[:, 0] = v[:, 0] = torch.nan
            found_NQD = step.attend_packed(i, q, k, v)
            assert found_NQD[0].isnan().all() and found_NQD[1].isfinite().all()
        step.finish()


def test_rows_of_like_length_share_a_call() -> None:
    assert grouped({0: 100, 1: 40, 2: 90, 3: 51, 4: 45}, 1000) == [[0, 2, 3], [4, 1]]
    assert grouped({0: 100, 1: 100, 2: 100}, 250) == [[0, 1], [2]]
    assert grouped({0: 900, 1: 800, 2: 10}, 500) == [[0], [1], [2]]
