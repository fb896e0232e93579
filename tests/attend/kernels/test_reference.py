"""The torch twins against plain attention over what the codecs decode, on real pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.attend.kernels import reference
from kvfold.attend.lse_merge import attend_reference
from kvfold.codec import Int4
from tests.attend.kernels.common import CODECS, DEVICE, Stored, open_blocks, store

LENS = (100, 1, 0, 33)


def expected(stored: Stored, head: int) -> tuple[Tensor, Tensor]:
    """Output [X, D] and log-sum-exp [X] of one head over all its slots."""
    q_RXD, offset_RX = stored.query()
    score_XS = q_RXD[head].float() @ stored.decoded("k", head).T
    if offset_RX is not None:
        score_XS += offset_RX[head].unsqueeze(-1)
    score_XS *= stored.scale
    if stored.bias is not None:
        score_XS += stored.bias[head]
    return score_XS.softmax(-1) @ stored.decoded("v", head), score_XS.logsumexp(-1)


def attended(stored: Stored, split: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs and log-sum-exps of tasks, and the tasks of each head."""
    task, order, task_range = stored.tasks(split)
    q, offset = stored.query()
    arguments = (*stored.names, *stored.groups, stored.scale, stored.bias is not None)
    return *reference.attend_tasks(q, offset, stored.arena.memory, task, order, *arguments), task_range


def assert_heads_right(stored: Stored, split: int = 64) -> None:
    out, lse, task_range = attended(stored, split)
    for head, (first, last) in enumerate(task_range.tolist()):
        if first == last:
            continue
        weight_CX = lse[first:last].softmax(0)
        want_out, want_lse = expected(stored, head)
        torch.testing.assert_close((weight_CX.unsqueeze(-1) * out[first:last]).sum(0), want_out, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(lse[first:last].logsumexp(0), want_lse, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_tasks_of_every_codec_merge_to_plain_attention(codec: str, head_dim: int) -> None:
    assert_heads_right(store(codec, codec, LENS, head_dim=head_dim))


@pytest.mark.parametrize("split", [32, 64, 4096])
def test_how_slots_are_split_does_not_matter(split: int) -> None:
    assert_heads_right(store("int4", "int2", (230, 64, 15, 17)), split)


def test_groups_of_channels() -> None:
    codecs = Int4(group_size=16), Int4(group_size=32)
    stored = store("int4", "int4", LENS, codecs=codecs)
    assert stored.groups == (4, 2)
    assert_heads_right(stored)


def test_biases() -> None:
    assert_heads_right(store("int8", "int4", LENS, with_bias=True))


def test_tasks_that_do_not_run_see_nothing() -> None:
    out, lse, task_range = attended(store("bf16", "bf16", LENS), 64)
    last = int(task_range.max())
    assert out[last:].eq(0).all() and lse[last:].eq(-torch.inf).all() and len(out) > last


@pytest.mark.parametrize("num_new", [1, 3])
@pytest.mark.parametrize(("fill", "sink_len"), [(0, 0), (5, 0), (5, 3)])
def test_merged_rows_equal_attention_to_everything(num_new: int, fill: int, sink_len: int) -> None:
    stored = store("bf16", "bf16", LENS, num_queries=2 * num_new)
    out, lse, task_range = attended(stored, 64)
    block = open_blocks(stored, [fill], num_new, sink_len=sink_len)
    found, found_lse = reference.merge_rows(out, lse, task_range, stored.q_RXD.float(), *block.arguments)
    for head, length in enumerate(LENS):
        open_k, open_v = block.k_before[0, head, :fill], block.v_before[0, head, :fill]
        sink_k, sink_v = block.k_sinks[0, head].float(), block.v_sinks[0, head].float()
        k_SD = torch.cat((sink_k, stored.decoded("k", head), open_k.float(), block.k_new[0, head].float()))
        v_SD = torch.cat((sink_v, stored.decoded("v", head), open_v.float(), block.v_new[0, head].float()))
        slot, token = torch.arange(len(k_SD), device=DEVICE), torch.arange(num_new, device=DEVICE)
        mask_TS = slot <= sink_len + length + fill + token.unsqueeze(-1)
        q_GTD = stored.q_RXD[head].float().unflatten(0, (2, num_new))
        want, want_lse = attend_reference(
            q_GTD.unsqueeze(0), k_SD.unsqueeze(0), v_SD.unsqueeze(0), stored.scale, mask_TS=mask_TS
        )
        torch.testing.assert_close(found[head], want.flatten(0, 2), atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(found_lse[head], want_lse.flatten(), atol=2e-5, rtol=1e-4)


def test_new_slots_are_stored_behind_the_fill_and_empty_lanes_touch_nothing() -> None:
    stored = store("bf16", "bf16", (0, 0, 0, 0), num_queries=2)
    block = open_blocks(stored, [3, -1], num_new=2)
    nothing = torch.zeros(1, 2, 64, device=DEVICE), torch.zeros(1, 2, device=DEVICE)
    task_range = torch.zeros(4, 2, dtype=torch.int32, device=DEVICE)
    found, lse = reference.merge_rows(*nothing, task_range, stored.q_RXD, *block.arguments)
    assert block.k[0, :, 3:5].eq(block.k_new[0]).all() and block.v[0, :, 3:5].eq(block.v_new[0]).all()
    assert block.k[0, :, :3].eq(block.k_before[0, :, :3]).all() and block.k[0, :, 5:].eq(block.k_before[0, :, 5:]).all()
    assert block.k[1].eq(block.k_before[1]).all() and block.v[1].eq(block.v_before[1]).all()
    assert found[2:].eq(0).all() and lse[2:].eq(-torch.inf).all() and lse[:2].isfinite().all()


def test_mass_of_all_slots_is_one_for_each_query() -> None:
    stored = store("int4", "int4", LENS, with_bias=True)
    task, order, _ = stored.tasks(64)
    q, offset = stored.query()
    lse_RX = torch.stack([expected(stored, head)[1] for head in range(len(LENS))])
    row_of_task = task[:, 0].clamp(min=0).to(torch.int32)
    mass = torch.ones(sum(LENS), device=DEVICE)
    common = (q, offset, stored.arena.memory, task, order)
    reference.task_mass(*common, lse_RX, row_of_task, "int4", stored.groups[0], stored.scale, mass, True)
    sums = torch.stack([(part - 1).sum() for part in mass.split(list(LENS))])
    num_queries = stored.q_RXD.shape[1]
    want = torch.tensor([0.0 if length == 0 else num_queries for length in LENS], device=DEVICE)
    torch.testing.assert_close(sums, want, atol=1e-3, rtol=1e-4)
    k_SD = stored.decoded("k", 0)
    assert stored.bias is not None and offset is not None
    score_XS = (q[0].float() @ k_SD.T + offset[0].unsqueeze(-1)) * stored.scale + stored.bias[0]
    torch.testing.assert_close(mass[: LENS[0]] - 1, score_XS.softmax(-1).sum(0), atol=1e-4, rtol=1e-3)
