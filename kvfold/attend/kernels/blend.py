"""Log-sum-exp merge of two attention outputs in one pass.

In plain operations the same costs five passes, most of them in fp32: as much as a tenth of the attention itself when a
prompt runs in chunks.

    Q query heads   T queries   D head dim
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_QUERIES = 16  # of a program


@triton.jit
def blend_kernel(
    a: tl.tensor, b: tl.tensor, a_lse: tl.tensor, b_lse: tl.tensor, lse: tl.tensor, num_queries: tl.tensor,
    a_head: tl.tensor, a_query: tl.tensor, b_head: tl.tensor, b_query: tl.tensor,
    D: tl.constexpr, DP: tl.constexpr, QUERIES: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    d = tl.arange(0, DP)
    inside = t < num_queries
    la = tl.load(a_lse + head * num_queries + t, mask=inside, other=0.0)
    lb = tl.load(b_lse + head * num_queries + t, mask=inside, other=0.0)
    top = tl.maximum(la, lb)
    shift = tl.where(top == float("-inf"), 0.0, top)  # nothing seen on either side must not become NaN
    wa, wb = tl.exp(la - shift), tl.exp(lb - shift)
    total = wa + wb
    share = wb / tl.where(total > 0, total, 1.0)
    tl.store(lse + head * num_queries + t, shift + tl.log(total), mask=inside)
    tile = inside[:, None] & (d < D)[None, :]
    at = a + head * a_head + t[:, None] * a_query + d[None, :]
    x = tl.load(at, mask=tile, other=0.0).to(tl.float32)
    y = tl.load(b + head * b_head + t[:, None] * b_query + d[None, :], mask=tile, other=0.0).to(tl.float32)
    tl.store(at, (x + share[:, None] * (y - x)).to(a.dtype.element_ty), mask=tile)


def blend(a_QTD: Tensor, a_lse_QT: Tensor, b_QTD: Tensor, b_lse_QT: Tensor) -> tuple[Tensor, Tensor]:
    """Output, written over the first part's, and log-sum-exp of both parts together."""
    num_heads, num_queries, head_dim = a_QTD.shape
    lse_QT = torch.empty(num_heads, num_queries, device=a_QTD.device)
    grid = (triton.cdiv(num_queries, _QUERIES), num_heads)
    blend_kernel[grid](
        a_QTD, b_QTD, a_lse_QT.contiguous(), b_lse_QT.contiguous(), lse_QT, num_queries,
        a_QTD.stride(0), a_QTD.stride(1), b_QTD.stride(0), b_QTD.stride(1),
        D=head_dim, DP=triton.next_power_of_2(head_dim), QUERIES=_QUERIES, num_warps=4,
    )  # fmt: skip
    return a_QTD, lse_QT
