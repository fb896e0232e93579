"""Formats that page kernels quantise to, from `Codec.kernel` and the fields of a page. Nothing here needs triton."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

from kvfold.codec.base import SIDES, Side
from kvfold.pages.layout import PageClass


class Encoding(NamedTuple):
    """Of one side: "float", as it comes; "fp8"; or "int", on grids of so many channels and slots."""

    form: Literal["float", "fp8", "int"]
    bits: int = 0
    clip: float = 1.0  # how much of its span a grid covers
    channels: int = 1
    span: int = 1


@cache
def encoding_of(page_class: PageClass, side: Side) -> Encoding | None:
    """None where there is no kernel for it."""
    codec = page_class.codec(side)
    kernel = codec.kernel
    if kernel is None:
        return None
    fields = {item.name: item for item in codec.fields(side, page_class.head_dim, page_class.kv_dtype)}
    if kernel.form == "float" and [item.dtype for item in fields.values()] != [page_class.kv_dtype]:
        return None  # not stored as they come: `bf16` rounds floats of other models
    if kernel.form != "int":
        return Encoding(kernel.form)
    return Encoding("int", kernel.bits, kernel.clip, page_class.head_dim // fields["scale"].width, codec.group(side))


@cache
def knows(page_class: PageClass) -> bool:
    """Whether kernels encode both sides: nothing else is kept of slots, and they are of a width that fills tiles."""
    fills_tiles = page_class.head_dim >= 16 and page_class.head_dim & (page_class.head_dim - 1) == 0
    has_kernels = all(encoding_of(page_class, side) is not None for side in SIDES)
    return fills_tiles and has_kernels and not page_class.summaries
