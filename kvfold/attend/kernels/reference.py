"""The operators of a decode step (ops.py) in plain torch: their signatures, and what every kernel is compared with.

Fields are read at their byte addresses and decoded by the codecs themselves; everything is computed in fp32.

    R rows of queries   X queries of a row   T new tokens   D head dim   S slots of a task
    V shifts of a row   F frequencies
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kvfold.attend.kernels.formats import BIAS, K_CODE, LENGTH, MASS, QUERY, SKIP, V_CODE, float_dtype, format_of
from kvfold.codec.base import Side
from kvfold.codec.integer import Int4
from kvfold.core import Rope


def attend_tasks(
    q_RXD: Tensor, offset_RX: Tensor | None, memory: Tensor, task: Tensor, order: Tensor | None,
    k_codec: str, v_codec: str, k_groups: int, v_groups: int, scale: float,
    has_bias: bool = False, has_skip: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output fp32 [capacity, X, D] and log-sum-exp fp32 [capacity, X] of each task that runs; here 0, -inf of others.

    q is in the stored key basis; the offset is added to q.k before scaling.
    """
    _, num_queries, head_dim = q_RXD.shape
    out = q_RXD.new_zeros(len(task), num_queries, head_dim, dtype=torch.float32)
    lse = q_RXD.new_full((len(task), num_queries), -torch.inf, dtype=torch.float32)
    for i, row in _running(task, order):
        score_XS = _scores(q_RXD, offset_RX, memory, row, k_codec, k_groups, scale, has_bias, has_skip)
        v_SD = _read(memory, row, "v", v_codec, v_groups, head_dim)
        lse[i] = score_XS.logsumexp(-1)
        out[i] = score_XS.softmax(-1) @ v_SD
    return out, lse


def task_mass(
    q_RXD: Tensor, offset_RX: Tensor | None, memory: Tensor, task: Tensor, order: Tensor | None,
    lse_RX: Tensor, row_of_task: Tensor, k_codec: str, k_groups: int, scale: float, mass: Tensor,
    has_bias: bool = False, has_skip: bool = False,
) -> None:  # fmt: skip
    """Add sum over X of exp(score - lse[row_of_task]) to mass[task.MASS + slot] (fp32, in place); a query whose lse is
    -inf saw nothing and adds nothing."""
    for i, row in _running(task, order):
        score_XS = _scores(q_RXD, offset_RX, memory, row, k_codec, k_groups, scale, has_bias, has_skip)
        lse_X = lse_RX[row_of_task[i]]
        share_XS = torch.exp(score_XS - lse_X.masked_fill(lse_X == -torch.inf, torch.inf).unsqueeze(-1))
        mass[row[MASS] : row[MASS] + row[LENGTH]] += share_XS.sum(0)


def rotated_query(q_RXD: Tensor, shift_RV: Tensor, period_F: Tensor, interleaved: bool) -> Tensor:
    """Row r * V + v has the queries of row r, rotated back by shift[r, v] (int32) positions.

    Period: turns per position, fp64. Twice as many channels turn as there are periods; in pairs (2i, 2i + 1) if
    interleaved, else (i, i + half).
    """
    rope = Rope(tuple((period_F * 2 * math.pi).tolist()), interleaved=interleaved)
    q_RVXD = q_RXD.unsqueeze(1).expand(-1, shift_RV.shape[1], -1, -1)
    rotated_RVXD = rope.rotate(q_RVXD, -shift_RV.unsqueeze(-1))
    return rotated_RVXD.flatten(0, 1)


def centred_query(q_RXD: Tensor, mean_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Queries in the basis of centred keys, in q's dtype, and q.mean, fp32 [R, X]; V rows of queries that follow one
    another share one of the R / V means."""
    rotated, offset = Int4().query(q_RXD, {"mean": mean_RD.repeat_interleave(len(q_RXD) // len(mean_RD), dim=0)})
    assert offset is not None
    return rotated.contiguous(), offset


def merge_rows(
    out: Tensor, lse: Tensor, task_range: Tensor, q_RXD: Tensor, k_new_BHTD: Tensor, v_new_BHTD: Tensor,
    memory: Tensor, open_address: Tensor, fill: Tensor, open_len: int,
    sink_address: Tensor, sink_fill: Tensor, sink_len: int, kv_dtype: str, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention [R, X, D] in q's dtype over tasks, open block and new slots, and its log-sum-exp fp32 [R, X].

    The new slots [B, H, T, D] are stored at fill .. fill + T - 1 of the open blocks, whose keys and values
    [H, open_len, D] begin at open_address [B, 2]; query g * T + t sees new slots up to t. New slots past the block's
    end are not stored. A lane with fill < 0 gets zeros, stores nothing. sink_fill slots [B] of blocks of sink_len,
    which begin at sink_address [B, 2], are seen by all queries.
    """
    num_rows, num_queries, head_dim = q_RXD.shape
    _, num_heads, num_new, _ = k_new_BHTD.shape
    result, result_lse = torch.zeros_like(q_RXD), lse.new_full((num_rows, num_queries), -torch.inf)
    query_t = torch.arange(num_queries, device=q_RXD.device) % num_new
    ranges, dtype = task_range.tolist(), float_dtype(kv_dtype)
    for row, (lane, head) in enumerate((i, j) for i in range(len(fill)) for j in range(num_heads)):
        used = int(fill[lane])
        if used < 0:
            continue
        k_SD, v_SD = (_open(memory, int(at), head, open_len, head_dim, dtype) for at in open_address[lane])
        k_TD, v_TD = k_new_BHTD[lane, head].to(dtype), v_new_BHTD[lane, head].to(dtype)
        room = open_len - used
        k_SD[used : used + num_new], v_SD[used : used + num_new] = k_TD[:room], v_TD[:room]
        k, v = torch.cat((k_SD[:used], k_TD)).float(), torch.cat((v_SD[:used], v_TD)).float()
        hidden_XS = torch.arange(len(k), device=k.device) > used + query_t.unsqueeze(-1)
        if count := int(sink_fill[lane]) if sink_len else 0:
            first = (_open(memory, int(at), head, sink_len, head_dim, dtype)[:count] for at in sink_address[lane])
            k, v = (torch.cat((x_SD, y_SD.float())) for x_SD, y_SD in zip((k, v), first, strict=True))
            hidden_XS = torch.cat((hidden_XS, hidden_XS.new_zeros(num_queries, count)), dim=-1)
        score_XS = (q_RXD[row].float() @ k.T * scale).masked_fill(hidden_XS, -torch.inf)
        tasks = slice(*ranges[row])
        # One softmax over slots and tasks: a task counts as a slot whose value is its output.
        score_XC = torch.cat((score_XS, lse[tasks].T), dim=-1)
        weight_XC = score_XC.softmax(-1)
        whole = weight_XC[:, : len(k)] @ v + torch.einsum("xc,cxd->xd", weight_XC[:, len(k) :], out[tasks])
        result[row], result_lse[row] = whole.to(q_RXD.dtype), score_XC.logsumexp(-1)
    return result, result_lse


def _running(task: Tensor, order: Tensor | None) -> Iterator[tuple[int, list[int]]]:
    rows = task.tolist()
    return ((i, rows[i]) for i in (range(len(rows)) if order is None else order.tolist()) if rows[i][LENGTH])


def _scores(
    q_RXD: Tensor,
    offset_RX: Tensor | None,
    memory: Tensor,
    row: list[int],
    k_codec: str,
    k_groups: int,
    scale: float,
    has_bias: bool,
    has_skip: bool,
) -> Tensor:
    """Scaled scores fp32 [X, S] with offset and bias; -inf for slots that are skipped."""
    k_SD = _read(memory, row, "k", k_codec, k_groups, q_RXD.shape[-1])
    score_XS = q_RXD[row[QUERY]].float() @ k_SD.T
    if offset_RX is not None:
        score_XS = score_XS + offset_RX[row[QUERY]].float().unsqueeze(-1)
    score_XS = score_XS * scale
    if has_bias:
        score_XS = score_XS + _array(memory, row[BIAS], row[LENGTH], 1, torch.float32).T
    if has_skip:
        score_XS[:, : row[SKIP]] = -torch.inf
    return score_XS


def _read(memory: Tensor, row: list[int], side: Side, codec: str, channel_groups: int, head_dim: int) -> Tensor:
    """One side of a task, decoded to fp32 [S, D]; keys in the stored basis."""
    found = format_of(codec)
    code, scale, zero = row[K_CODE : K_CODE + 3] if side == "k" else row[V_CODE : V_CODE + 3]
    length, width = row[LENGTH], found.width(head_dim)
    if found.form == "float":
        return _array(memory, code, length, width, found.dtype).float()
    span = found.key_span if side == "k" else 1
    num_rows = -(-length // span)
    groups = found.groups(head_dim, channel_groups, is_key=side == "k")
    fields = {
        "code": _array(memory, code, num_rows * span, width, found.dtype),
        "scale": _array(memory, scale, num_rows, groups, torch.bfloat16),
    }
    if found.form == "int":
        fields["zero"] = _array(memory, zero, num_rows, groups, torch.bfloat16)
    return found.codec.decode(side, fields, torch.float32)[:length]


def _open(memory: Tensor, address: int, head: int, open_len: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """A view of one head's open block [open_len, D]."""
    return _array(memory, address + head * open_len * head_dim * dtype.itemsize, open_len, head_dim, dtype)


def _array(memory: Tensor, address: int, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """A view of memory: [rows, width] from a byte address on."""
    return memory[address : address + num_rows * width * dtype.itemsize].view(dtype).view(num_rows, width)
