"""Real pages of every codec, the tasks that cover them, and what attention to them should give.

R rows (KV heads)   X queries of a row   S slots   D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvfold.attend.kernels.formats import (
    BIAS,
    K_CODE,
    K_SCALE,
    K_ZERO,
    LENGTH,
    MASS,
    NUM_COLUMNS,
    QUERY,
    SKIP,
    V_CODE,
    V_SCALE,
    V_ZERO,
)
from kvfold.codec import Codec, Fp8, Int2, Int4, Int8, Kivi2, Kivi4, Native, Side
from kvfold.pages.arena import Arena
from kvfold.pages.extent import Extent
from kvfold.pages.layer import LayerPages
from kvfold.pages.layout import PageClass

# Kernels run on a GPU or in triton's interpreter (tests/conftest.py), never in both within one process.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 32
CODECS: dict[str, Codec] = {
    "fp32": Native(),
    "fp16": Native(),
    "bf16": Native(),
    "fp8": Fp8(),
    "int8": Int8(),
    "int4": Int4(),
    "int2": Int2(),
    "kivi4": Kivi4(),
    "kivi2": Kivi2(),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_COLUMNS = {
    "k.x": K_CODE,
    "k.code": K_CODE,
    "k.scale": K_SCALE,
    "k.zero": K_ZERO,
    "v.x": V_CODE,
    "v.code": V_CODE,
    "v.scale": V_SCALE,
    "v.zero": V_ZERO,
}


@dataclass
class Stored:
    """One layer's pages, and queries to them in the model's own basis."""

    arena: Arena
    pages: LayerPages
    names: tuple[str, str]
    q_RXD: Tensor
    bias: list[Tensor] | None = None  # fp32 [S] for each head, also in the arena at `bias_address`
    bias_address: Sequence[int] = ()

    @property
    def scale(self) -> float:
        return float(self.pages.page_class.head_dim**-0.5)

    @property
    def groups(self) -> tuple[int, int]:
        widths = {item.name: item.width for item in self.pages.page_class.fields}
        return widths.get("k.scale", 1), widths.get("v.scale", 1)

    def query(self) -> tuple[Tensor, Tensor | None]:
        return self.pages.page_class.k.query(self.q_RXD, self.pages.state.get("k", {}))

    def tasks(self, split: int, spare: int = 3, *, skip: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The table with `spare` rows of noise behind it, the order of tasks, and the tasks of each head [R, 2].

        Tasks leave out their first `skip` slots, where they have more.
        """
        rows: list[list[int]] = []
        ranges = []
        mass = [0, *accumulate(self.pages.lens)]
        for head, extents in enumerate(self.pages.extents):
            done, before = 0, len(rows)
            for extent in extents:
                for begin in range(0, extent.length, split):
                    row = self._row(extent, begin)
                    row[QUERY], row[LENGTH] = head, min(split, extent.length - begin)
                    row[BIAS] = self.bias_address[head] + 4 * (done + begin) if self.bias else 0
                    row[MASS] = mass[head] + done + begin
                    row[SKIP] = skip if row[LENGTH] > skip else 0
                    rows.append(row)
                done += extent.length
            ranges.append((before, len(rows)))
        task = torch.tensor(rows + [[-1] * NUM_COLUMNS] * spare, dtype=torch.int64, device=DEVICE)
        order = torch.arange(len(rows), dtype=torch.int32, device=DEVICE).flip(0)
        return task, order, torch.tensor(ranges, dtype=torch.int32, device=DEVICE)

    def _row(self, extent: Extent, begin: int) -> list[int]:
        page_class, row = self.pages.page_class, [0] * NUM_COLUMNS
        for item in page_class.fields:
            if item.name in _COLUMNS:
                field = extent.span.fields[item.name]
                per = page_class.page_size // page_class.rows_per_page(item)
                first = (extent.first * page_class.page_size + begin) // per
                row[_COLUMNS[item.name]] = (int(field.storage_offset()) + first * item.width) * field.itemsize
        return row

    def decoded(self, side: Side, head: int) -> Tensor:
        """One side of a head by its codec's own `decode`, fp32 [S, D]; keys in the stored basis."""
        codec = self.pages.page_class.codec(side)
        found = [torch.empty(0, self.q_RXD.shape[-1], device=self.arena.device)]
        for run in self.pages.runs():
            x_ND = codec.decode(side, run.sides[side], torch.float32)
            slots = {mine: slice(at, at + n) for mine, at, n in zip(run.heads, run.starts, run.lens, strict=True)}
            found += [x_ND[slots[head]]] if head in slots else []
        return torch.cat(found)


def store(
    k: str,
    v: str,
    lens: Sequence[int],
    *,
    head_dim: int = 64,
    num_queries: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    codecs: tuple[Codec, Codec] | None = None,
    with_bias: bool = False,
    seed: int = 0,
) -> Stored:
    """Random slots, sealed in two goes so that longer heads lie in two extents."""
    torch.manual_seed(seed)
    kv_dtype = DTYPES.get(k, DTYPES.get(v, torch.bfloat16))
    page_class = PageClass(*(codecs or (CODECS[k], CODECS[v])), head_dim, kv_dtype, page_size=PAGE)
    arena = Arena(8 << 20, device=DEVICE)
    pages = LayerPages(page_class, len(lens))
    early = [length // 2 // PAGE * PAGE for length in lens]
    most = max(lens)
    key_shift = 3 * torch.randn(len(lens), 1, head_dim)
    k_RSD = (torch.randn(len(lens), most, head_dim) + key_shift).to(DEVICE, kv_dtype)
    v_RSD = (torch.randn(len(lens), most, head_dim) + 0.5).to(DEVICE, kv_dtype)
    valid = (torch.arange(most) < torch.tensor(lens).unsqueeze(-1)).to(DEVICE)
    pages.state = {"k": page_class.k.init_state("k", k_RSD, valid), "v": page_class.v.init_state("v", v_RSD, valid)}
    for begin, end in (([0] * len(lens), early), (early, list(lens))):
        _seal(arena, pages, k_RSD, v_RSD, begin, end)
    q = (torch.randn(len(lens), num_queries, head_dim) * 2).to(DEVICE, dtype)
    stored = Stored(arena, pages, (k, v), q)
    if with_bias:
        _add_bias(stored, lens)
    return stored


def _seal(
    arena: Arena, pages: LayerPages, k_RSD: Tensor, v_RSD: Tensor, begin: Sequence[int], end: Sequence[int]
) -> None:
    """Slots begin .. end of each head, in pages of a span of their own."""
    page_class, counts = pages.page_class, [b - a for a, b in zip(begin, end, strict=True)]
    span = arena.allocate(page_class, max(1, sum(page_class.pages_for(count) for count in counts)))[0]
    for head, count in enumerate(counts):
        taken = span.allocate_pages(page_class.pages_for(count)) if count else None
        if taken is not None:
            pages.grow(head, span, *taken)
    k_ND, v_ND = (
        torch.cat([x_SD[a:b] for x_SD, a, b in zip(x_RSD, begin, end, strict=True)]) for x_RSD in (k_RSD, v_RSD)
    )
    position_N = torch.arange(sum(counts), device=DEVICE)
    if sum(counts):
        pages.append(pages.encode(k_ND, v_ND, position_N, counts), counts)


def _add_bias(stored: Stored, lens: Sequence[int]) -> None:
    """Biases behind everything that was lent."""
    at = stored.arena.capacity_bytes - 4 * sum(-(-length // 4) * 4 for length in lens)
    stored.bias, addresses = [], []
    for length in lens:
        bias = torch.randn(length, device=stored.arena.device)
        stored.arena.memory[at : at + 4 * length].view(torch.float32).copy_(bias)
        stored.bias.append(bias)
        addresses.append(at)
        at += 4 * (-(-length // 4) * 4)
    stored.bias_address = addresses


@dataclass
class OpenBlocks:
    """Open blocks of several lanes in a stored layer's arena, and new slots for them."""

    k: Tensor  # [B, H, open_len, D], views of the arena
    v: Tensor
    k_new: Tensor  # [B, H, T, D], rows apart
    v_new: Tensor
    k_sinks: Tensor  # [B, H, sink_len, D]; all of them are there in the first lane, none in others
    v_sinks: Tensor
    arguments: tuple[Any, ...]  # of merge_rows, from k_new on

    def __post_init__(self) -> None:
        self.k_before, self.v_before = self.k.clone(), self.v.clone()


def open_blocks(
    stored: Stored, fill: Sequence[int], num_new: int, *, open_len: int = 8, sink_len: int = 0, dtype: str = "bf16"
) -> OpenBlocks:
    """Random blocks behind everything that was lent; `stored` has the rows of all lanes."""
    num_lanes, (num_rows, _, head_dim) = len(fill), stored.q_RXD.shape
    kv_dtype = DTYPES[dtype]
    shape = (num_lanes, num_rows // num_lanes, open_len, head_dim)
    at = stored.arena.capacity_bytes // 2
    k, v, address = _blocks(stored, at, shape, kv_dtype)
    sink_shape = (*shape[:2], sink_len, head_dim)
    k_sinks, v_sinks, sink_address = _blocks(stored, at + k.nbytes + v.nbytes, sink_shape, kv_dtype)
    sink_fill = torch.tensor([sink_len] + [0] * (num_lanes - 1), device=DEVICE)
    new = torch.randn(num_new, num_lanes, 2, num_rows // num_lanes, head_dim).to(DEVICE, kv_dtype)
    k_new, v_new = new.permute(2, 1, 3, 0, 4)
    fills = torch.tensor(fill, dtype=torch.int32, device=DEVICE)
    blocks = (address, fills, open_len, sink_address, sink_fill, sink_len)
    arguments = (k_new, v_new, stored.arena.memory, *blocks, dtype, stored.scale)
    return OpenBlocks(k, v, k_new, v_new, k_sinks, v_sinks, arguments)


def _blocks(stored: Stored, at: int, shape: tuple[int, ...], kv_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Random keys and values [B, H, slots, D] from a byte of the arena on, and the addresses [B, 2] of each lane's."""
    numbers = torch.randn(2, *shape).to(DEVICE, kv_dtype)
    memory = stored.arena.memory[at : at + numbers.nbytes]
    memory.copy_(numbers.flatten().view(torch.uint8))
    k, v = memory.view(kv_dtype).view(2, *shape)
    address = [[at + i * k[0].nbytes, at + (len(k) + i) * k[0].nbytes] for i in range(len(k))]
    return k, v, torch.tensor(address, device=DEVICE)
