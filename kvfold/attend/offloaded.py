"""Attention to offloaded KV pages (`recall`): the top pages by Quest's bound are copied back from host memory.

A decoded token selects for itself, also in a draft, so speculative decoding changes no result; the tokens of a prefill
chunk select together and see the same pages.

    H KV heads   G query heads per KV head   T queries   X choices: T, or 1   M pages   W pages read   P slots of a page
    R rows: the (KV head, choice) pairs   S slots of a row, W * P   D head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.attend.lse_merge import LseMerge, attend
from kvfold.attend.quest import upper_bound
from kvfold.pages.host_offload import OffloadedLayer
from kvfold.pages.sequence import SequenceCache

_TILE = 64  # queries whose bounds of all pages exist at once
_UNUSED = -3e4  # bias of an unused slot: below every score, and finite in every dtype


def merge_offloaded(merge: LseMerge, sequence: SequenceCache, layer: int, q_HGTD: Tensor, *, together: bool) -> None:
    """Merge attention to recalled pages of one layer, if it has offloaded any."""
    offloaded = sequence.offloaded.layers.get(layer) if sequence.offloaded is not None else None
    if offloaded is None or not offloaded.num_pages:
        return
    q_HGTD = _shifted_queries(sequence, layer, offloaded, q_HGTD)
    index_HXW = topk_pages(offloaded, q_HGTD, together=together)
    k_RSD, v_RSD, bias_RS = _gathered(offloaded, index_HXW, q_HGTD)
    q_RGXD = q_HGTD if together else q_HGTD.transpose(1, 2).flatten(0, 1).unsqueeze(2)
    out, lse = attend(q_RGXD, k_RSD, v_RSD, offloaded.spec.scale, bias_HS=bias_RS)
    if not together:
        shape = index_HXW.shape[:2]
        out, lse = (x.squeeze(2).unflatten(0, shape).transpose(1, 2) for x in (out, lse))
    merge.add(slice(0, len(q_HGTD)), out, lse)


def topk_pages(offloaded: OffloadedLayer, q_HGTD: Tensor, *, together: bool) -> Tensor:
    """Pages of largest weight, int64 [H, X, W]; all of them where there are no more."""
    num_pages = offloaded.num_pages
    most = min(offloaded.recall.num_pages, num_pages)
    weights = [_weights(offloaded, part) for part in q_HGTD.split(_TILE, dim=2)]
    if together:
        weight_HXM = torch.stack([part.sum(1) for part in weights]).sum(0).unsqueeze(1)
    else:
        weight_HXM = torch.cat(weights, dim=1)
    return weight_HXM.topk(most, sorted=False).indices


def _weights(offloaded: OffloadedLayer, q_HGTD: Tensor) -> Tensor:
    """[H, T, M]: a page of no slot weighs less than any other."""
    pages, num_pages = offloaded.pages.tensors, offloaded.num_pages
    bound_HGTM = upper_bound(q_HGTD, pages["low"][:, :num_pages], pages["high"][:, :num_pages]).float()
    unused_HM = pages["used"][:, :num_pages] == 0
    score_HGTM = (bound_HGTM * offloaded.spec.scale).masked_fill(unused_HM[:, None, None], -torch.inf)
    weight_HTM = score_HGTM.softmax(-1).mean(1)
    return weight_HTM.masked_fill(unused_HM.unsqueeze(1), -1.0)


def _shifted_queries(sequence: SequenceCache, layer: int, offloaded: OffloadedLayer, q_HGTD: Tensor) -> Tensor:
    """With `slot` positions, queries rotated so that a page of P slots ends where the first stored slot is."""
    if not offloaded.rotates:
        return q_HGTD
    assert offloaded.spec.rope is not None
    ends = [sequence.sealed_len - length for length in sequence.stored_lens(layer)]
    shift_H = torch.tensor([end - offloaded.recall.page for end in ends], device=q_HGTD.device)
    return offloaded.spec.rope.rotate(q_HGTD, -shift_H.view(-1, 1, 1))


def _gathered(offloaded: OffloadedLayer, index_HXW: Tensor, q_HGTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values [R, S, D] and biases [R, S] of pages, gathered on the host and sent on the queue of the device."""
    heads, choices, _ = index_HXW.shape
    index_HN = index_HXW.flatten(1)
    first_HN, used_HN = (offloaded.pages.tensors[name].gather(1, index_HN) for name in ("first", "used"))
    place_P = torch.arange(offloaded.recall.page, device=index_HN.device)
    is_used_HNP = place_P < used_HN.unsqueeze(-1)
    slot_HS = (first_HN.unsqueeze(-1) + place_P).masked_fill(~is_used_HNP, 0).flatten(1)
    head_H1, on_host_HS = torch.arange(heads).unsqueeze(-1), slot_HS.to("cpu", torch.int64)
    sent = []
    for name in ("k", "v"):
        rows_HSD = offloaded.slots.tensors[name][head_H1, on_host_HS]
        if q_HGTD.is_cuda:
            rows_HSD = rows_HSD.pin_memory().to(q_HGTD.device, non_blocking=True)
        sent.append(rows_HSD.to(q_HGTD.dtype).view(heads * choices, -1, rows_HSD.shape[-1]))
    bias_HNP = torch.zeros_like(is_used_HNP, dtype=torch.float32).masked_fill(~is_used_HNP, _UNUSED)
    return sent[0], sent[1], bias_HNP.view(heads * choices, -1)
