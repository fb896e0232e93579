"""Approximate attention by min/max of key channels of small pages, in the top channels (RocketKV, Quest, SparQ).

The second stage of RocketKV (arXiv:2502.14051), which joins Quest's bound on a page (arXiv:2406.10774) with SparQ's
choice of channels (arXiv:2312.04985). For a group of queries q_g that share keys, with s = sum_g q_g:

    k̂_d = the largest k_d of the page where s_d > 0, else the least         channels: the r of largest mean_g |q_d|
    z_g = sum over these channels of q_d k̂_d, over sqrt(sum |q| of these channels / sum |q| of all)

The root is SparQ's temperature: fewer channels make smaller sums, which would flatten a softmax. All slots of a page
have its score. A page is a few slots in a row here; the last of a memory page may be shorter.

    H KV heads   G query heads per KV head   T queries   D head dim   M memory pages   P slots of one   C pages in one
    X pages, M * C   S slots, M * P   R channels that count
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfold.codec.base import Field
from kvfold.policy.reader import PageView


def fields(head_dim: int, kv_dtype: torch.dtype, page_size: int, page: int) -> tuple[Field, ...]:
    width = -(-page_size // page) * head_dim
    return Field("min", kv_dtype, width, per="page"), Field("max", kv_dtype, width, per="page")


def bounds(k_MPD: Tensor, used_MP: Tensor, page: int) -> dict[str, Tensor]:
    """The rows of both fields; a page without slots holds infinities."""
    unused_MP1 = ~used_MP.unsqueeze(-1)
    more = -k_MPD.shape[1] % page

    def folded(fill: float) -> Tensor:
        k = pad(k_MPD.masked_fill(unused_MP1, fill), (0, 0, 0, more), value=fill)
        folded_MCPD: Tensor = k.unflatten(1, (-1, page))
        return folded_MCPD

    return {"min": folded(torch.inf).amin(2).flatten(1), "max": folded(-torch.inf).amax(2).flatten(1)}


def logits(view: PageView, page: int, num_channels: int) -> Tensor:
    """z * scale, fp32 [H, G, T, S]; of slots that are not used anything, also NaN."""
    q_HGTD = view.q_HGTD.float()
    head_dim = q_HGTD.shape[-1]
    low_HXD, high_HXD = (view.summaries.read(name).float().unflatten(-1, (-1, head_dim)) for name in ("min", "max"))
    num_pages = low_HXD.shape[1]  # of memory
    low_HXD, high_HXD = low_HXD.flatten(1, 2), high_HXD.flatten(1, 2)
    index_HTR = q_HGTD.abs().mean(1).topk(num_channels, dim=-1).indices
    few_HGTR = q_HGTD.gather(-1, index_HTR.unsqueeze(1).expand(-1, q_HGTD.shape[1], -1, -1))
    rises_HTR = q_HGTD.sum(1).gather(-1, index_HTR) > 0
    index_HTXR = index_HTR.unsqueeze(2).expand(-1, -1, low_HXD.shape[1], -1)
    low_HTXR, high_HTXR = (
        x_HXD.unsqueeze(1).expand(-1, index_HTR.shape[1], -1, -1).gather(-1, index_HTXR)
        for x_HXD in (low_HXD, high_HXD)
    )
    bound_HTXR = torch.where(rises_HTR.unsqueeze(2), high_HTXR, low_HTXR)
    z_HGTX = torch.einsum("hgtr,htxr->hgtx", few_HGTR, bound_HTXR)
    share_HGT1 = few_HGTR.abs().sum(-1, keepdim=True) / q_HGTD.abs().sum(-1, keepdim=True).clamp(min=1e-30)
    scaled_HGTX = z_HGTX * view.scale / share_HGT1.clamp(min=1e-30).sqrt()
    by_page: Tensor = scaled_HGTX.unflatten(-1, (num_pages, -1)).repeat_interleave(page, dim=-1)[..., : view.page_size]
    return by_page.flatten(-2)
