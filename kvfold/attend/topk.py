"""Sparse attention while decoding: the top slots that a reader (Quest, RocketKV) selects for each query, in one call.

Every query of a draft selects for itself, as it would alone, so speculative decoding changes no result.

    H KV heads   G query heads per KV head   T queries   R rows: the (KV head, query) pairs   D head dim
    U units of the longest head   W units read by a row   P slots of a unit   S slots of a row, W * P
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvfold.attend.lse_merge import attend
from kvfold.pages.page_gather import PageList
from kvfold.pages.read import in_basis
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.reader import PageView


@dataclass(frozen=True)
class TopkSlots:
    """Slots of the units selected by each row; queries in the basis of the keys."""

    heads: slice  # all of them
    q_RGD: Tensor
    k_RSD: Tensor
    v_RSD: Tensor
    offset_HGT: Tensor | None  # added to q.k before scaling
    valid_RS: Tensor
    slot_RS: Tensor  # index in the head's row of stored slots

    def attend(self, scale: float) -> tuple[Tensor, Tensor]:
        mask_R1TS = self.valid_RS[:, None, None]
        out, lse = attend(self.q_RGD.unsqueeze(2), self.k_RSD, self.v_RSD, scale, mask_TS=mask_R1TS)
        out_HGTD, lse_HGT = self._by_head(out.squeeze(2)), self._by_head(lse.squeeze(2))
        return out_HGTD, lse_HGT if self.offset_HGT is None else lse_HGT + self.offset_HGT * scale

    def add_mass(self, total_HS: Tensor, lse_HGT: Tensor, scale: float) -> None:
        """Add the attention each slot received, given the log-sum-exp over everything the queries saw."""
        lse_RG = lse_HGT.transpose(1, 2).flatten(0, 1)
        score_RGS = self.q_RGD.float() @ self.k_RSD.float().transpose(-1, -2)
        if self.offset_HGT is not None:
            score_RGS += self.offset_HGT.transpose(1, 2).flatten(0, 1).unsqueeze(-1)
        weight_RGS = torch.exp(score_RGS * scale - lse_RG.unsqueeze(-1))
        mass_RS = weight_RGS.sum(1).masked_fill(~self.valid_RS, 0.0)
        total_HS.scatter_add_(1, self.slot_RS.view(self.heads.stop, -1), mass_RS.view(self.heads.stop, -1))

    def _by_head(self, x_RG: Tensor) -> Tensor:
        """Rows [R, G, …] as [H, G, T, …]."""
        x_HTG: Tensor = x_RG.unflatten(0, (self.heads.stop, -1))
        return x_HTG.transpose(1, 2)


def select_topk(sequence: SequenceCache, layer: int, q_HGTD: Tensor) -> TopkSlots | None:
    """The slots that the layer's reader selects for these queries; None if that would be all."""
    pages = sequence.page_list(layer)
    page_class = pages.page_class
    unit = page_class.reader.unit(page_class.page_size, page_class.group)
    num_units = page_class.reader.num_units(unit)
    if pages.num_pages * page_class.page_size <= num_units * unit:
        return None
    q, offset = in_basis(sequence.tail.layers[layer], q_HGTD)  # segments of a sequence share codec states
    scale = sequence.spec.layers[layer].scale
    view = PageView(q, offset, scale, pages, pages.used_HU(unit), num_units, page_class.page_size)
    index_HTW = page_class.reader.select(view)
    return _gathered(pages, unit, q, offset, index_HTW.sort(-1).values, sequence.num_fp_sinks(layer))


def _gathered(
    pages: PageList, unit: int, q_HGTD: Tensor, offset_HGT: Tensor | None, index_HTW: Tensor, num_fp_sinks: int
) -> TopkSlots:
    """The first `num_fp_sinks` slots are read elsewhere, in full precision."""
    page_class, rows = pages.page_class, index_HTW.shape[0] * index_HTW.shape[1]
    index_HN = index_HTW.flatten(1)
    codes = pages.codes(pages.number_HU(unit).gather(1, index_HN).flatten(), unit)
    k_ND = page_class.k.decode("k", codes["k"], q_HGTD.dtype)
    v_ND = page_class.v.decode("v", codes["v"], q_HGTD.dtype)
    used_HU = pages.used_HU(unit)
    first_HU = used_HU.cumsum(1) - used_HU
    slot_P = torch.arange(unit, device=index_HN.device)
    valid_HNP = slot_P < used_HU.gather(1, index_HN).unsqueeze(-1)
    slot_HNP = (first_HU.gather(1, index_HN).unsqueeze(-1) + slot_P).masked_fill(~valid_HNP, 0)
    return TopkSlots(
        slice(0, len(index_HN)),
        q_HGTD.transpose(1, 2).flatten(0, 1),
        _unused_cleared(k_ND, valid_HNP).view(rows, -1, k_ND.shape[-1]),
        _unused_cleared(v_ND, valid_HNP).view(rows, -1, v_ND.shape[-1]),
        offset_HGT,
        (valid_HNP & (slot_HNP >= num_fp_sinks)).view(rows, -1),
        slot_HNP.view(rows, -1),
    )


def _unused_cleared(x_ND: Tensor, valid_HNP: Tensor) -> Tensor:
    """Slots past the end of a unit hold whatever memory held, and 0 * NaN is NaN."""
    return x_ND.masked_fill(~valid_HNP.view(-1, 1), 0.0)
