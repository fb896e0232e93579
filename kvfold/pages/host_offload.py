"""KV offload: evicted slots of a sequence in host memory, in pages, with page summaries on the device (`recall`).

Pages are written once, so forks share them. The layers of a sequence share one staging area, into which the pages of a
read are copied.

    H KV heads   N slots of a head on the host   M pages   D head dim   n slots that go at once
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from kvfold.core import LayerSpec, ModelSpec
from kvfold.errors import InputError
from kvfold.evicted.base import PagedRecall


class OffloadedLayer:
    """`slots` (host): "k", "v", "position"; `pages` (device): "first" slot, slots "used", "low" and "high" keys."""

    def __init__(
        self, recall: PagedRecall, spec: LayerSpec, dtype: torch.dtype, device: torch.device, rotates: bool
    ) -> None:
        self.recall = recall
        self.spec = spec
        self.rotates = rotates  # `slot` positions: keys of a page are rotated to positions 0, 1, 2 …
        heads, dim = spec.num_kv_heads, spec.head_dim
        none_HND, none_HN = torch.empty(heads, 0, dim, dtype=dtype), torch.empty(heads, 0, dtype=torch.int32)
        self.slots = GrowingRows({"k": none_HND, "v": none_HND, "position": none_HN})
        here_HND, here_HN = none_HND.to(device), none_HN.to(device)
        self.pages = GrowingRows({"first": here_HN, "used": here_HN, "low": here_HND, "high": here_HND})

    @property
    def num_pages(self) -> int:
        """Pages of the head that has most."""
        return max(self.pages.lens)

    @property
    def slot_bytes(self) -> int:
        """Of one slot of one head, as it is read."""
        return 2 * self.spec.head_dim * self.slots.tensors["k"].itemsize

    @property
    def staging_bytes(self) -> int:
        """Of what one read brings back."""
        num_pages = min(self.num_pages, self.recall.num_pages)
        return self.spec.num_kv_heads * num_pages * self.recall.page * self.slot_bytes

    @property
    def read_bytes(self) -> int:
        """Of the summaries and pages that one decoded token reads."""
        pages = [min(count, self.recall.num_pages) * self.recall.page * self.slot_bytes for count in self.pages.lens]
        return sum(pages) + self.pages.num_bytes

    def positions(self, head: int) -> Tensor:
        """Original positions of a head's slots, int32."""
        return self.slots.tensors["position"][head, : self.slots.lens[head]]

    def offload(self, head: int, k_nD: Tensor, v_nD: Tensor, position_n: Tensor, used: Sequence[int]) -> None:
        """Slots in order of position become pages of `used` slots each."""
        if self.rotates:
            assert self.spec.rope is not None
            place_n = torch.cat([torch.arange(count) for count in used]).to(position_n.device)
            k_nD = self.spec.rope.rotate(k_nD, place_n - position_n)
        self.append(head, k_nD, v_nD, position_n, used)

    def append(self, head: int, k_nD: Tensor, v_nD: Tensor, position_n: Tensor, used: Sequence[int]) -> None:
        """Slots as they are stored on the host."""
        device = self.pages.tensors["low"].device
        used_m = torch.tensor(used, device=device)
        page_nD = torch.arange(len(used), device=device).repeat_interleave(used_m).unsqueeze(-1).expand_as(k_nD)
        keys_nD = k_nD.to(device, torch.float32)
        none_mD = keys_nD.new_zeros(len(used), k_nD.shape[1])
        self.pages.append(head, {
            "first": self.slots.lens[head] + used_m.cumsum(0) - used_m,
            "used": used_m,
            "low": none_mD.scatter_reduce(0, page_nD, keys_nD, "amin", include_self=False),
            "high": none_mD.scatter_reduce(0, page_nD, keys_nD, "amax", include_self=False),
        })  # fmt: skip
        self.slots.append(head, {"k": k_nD, "v": v_nD, "position": position_n})

    def copy(self) -> OffloadedLayer:
        found = copy(self)
        found.slots, found.pages = self.slots.copy(), self.pages.copy()
        return found

    def tensors(self) -> dict[str, Tensor]:
        """What `restore` takes: slots, rows padded with 0, and the slots of each page."""
        num_slots, num_pages = max(self.slots.lens), self.num_pages
        found = {name: tensor[:, :num_slots] for name, tensor in self.slots.tensors.items()}
        return found | {"used": self.pages.tensors["used"][:, :num_pages]}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill an empty layer; InputError if the pages are not those of the slots."""
        used_HM = tensors["used"].long()
        rows = {name: tensors[name] for name in self.slots.tensors}
        shape = (self.spec.num_kv_heads, int(used_HM.sum(1).max()))
        is_whole = all(row.shape[:2] == shape for row in rows.values()) and len(used_HM) == shape[0]
        if not is_whole or bool(((used_HM < 0) | (used_HM > self.recall.page)).any()):
            raise InputError(f"pages on the host of {tuple(used_HM.shape)} do not fit slots of {shape}")
        for head, used_M in enumerate(used_HM):
            used = used_M[used_M > 0].tolist()
            if used:
                mine = slice(0, sum(used))
                self.append(head, rows["k"][head, mine], rows["v"][head, mine], rows["position"][head, mine], used)


class OffloadedSlots:
    """Of all layers; those that are never compressed have none."""

    def __init__(self, recall: PagedRecall, spec: ModelSpec, device: torch.device, rotates: bool) -> None:
        self.recall = recall
        self.layers = {
            i: OffloadedLayer(recall, spec.layers[i], spec.kv_dtype, device, rotates) for i in spec.compressible_layers
        }

    @property
    def host_bytes(self) -> int:
        return sum(layer.slots.num_bytes for layer in self.layers.values())

    @property
    def resident_bytes(self) -> int:
        """Summaries, and the staging area that the layers share."""
        staging = max((layer.staging_bytes for layer in self.layers.values()), default=0)
        return staging + sum(layer.pages.num_bytes for layer in self.layers.values())

    def copy(self) -> OffloadedSlots:
        found = copy(self)
        found.layers = {i: layer.copy() for i, layer in self.layers.items()}
        return found


_GROWTH = 4  # a quarter more than is needed: rows are moved a few times each


class GrowingRows:
    """Tensors [H, C, …] by name, of which head h has written the first `lens[h]` rows."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Tensors without rows say what a row is like."""
        self.tensors = dict(tensors)
        self.lens = [0] * len(next(iter(self.tensors.values())))
        self._written = list(self.lens)  # by any copy that shares the tensors

    @property
    def capacity(self) -> int:
        return next(iter(self.tensors.values())).shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def append(self, head: int, rows: Mapping[str, Tensor]) -> None:
        """Rows [n, …] of every name behind the head's others."""
        begin = self.lens[head]
        end = begin + len(next(iter(rows.values())))
        if end > self.capacity or self._written[head] != begin:
            self._move(end + end // _GROWTH if end > self.capacity else self.capacity)
        for name, tensor in self.tensors.items():
            tensor[head, begin:end] = rows[name]
        self.lens[head] = self._written[head] = end

    def _move(self, capacity: int) -> None:
        """To tensors that no copy shares."""
        used = max(self.lens)
        for name, old in self.tensors.items():
            with torch.inference_mode(False):  # rows are written outside of it, too
                new = torch.zeros(len(old), capacity, *old.shape[2:], dtype=old.dtype, device=old.device)
            new[:, :used] = old[:, :used]
            self.tensors[name] = new
        self._written = list(self.lens)

    def copy(self) -> GrowingRows:
        """The same rows; the tensors are shared."""
        found = GrowingRows(self.tensors)
        found.lens, found._written = list(self.lens), self._written
        return found
