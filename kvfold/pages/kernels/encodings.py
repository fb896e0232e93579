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


def encoding_of(page_class: PageClass, side: Side) -> Encoding | None:
    """None where there is no kernel for it."""
    codec = page_class.codec(side)
    kernel = codec.kernel
    if kernel is None or (kernel.form == "float" and not _stays(page_class, side)):
        return None
    if kernel.form != "int":
        return Encoding(kernel.form)
    return Encoding("int", kernel.bits, kernel.clip, _grid_channels(page_class, side), codec.group(side))


def _stays(page_class: PageClass, side: Side) -> bool:
    """Whether floats are stored as they come: `bf16` rounds those of other models."""
    fields = page_class.codec(side).fields(side, page_class.head_dim, page_class.kv_dtype)
    return [item.dtype for item in fields] == [page_class.kv_dtype]


def _grid_channels(page_class: PageClass, side: Side) -> int:
    fields = page_class.codec(side).fields(side, page_class.head_dim, page_class.kv_dtype)
    (num_grids,) = (item.width for item in fields if item.name == "scale")
    return page_class.head_dim // num_grids


@cache
def knows(page_class: PageClass) -> bool:
    """Whether kernels encode both sides: nothing else is kept of slots, and they are of a width that fills tiles."""
    fills_tiles = page_class.head_dim >= 16 and page_class.head_dim & (page_class.head_dim - 1) == 0
    has_kernels = all(encoding_of(page_class, side) is not None for side in SIDES)
    return fills_tiles and has_kernels and not page_class.summaries


@cache
def constants(page_class: PageClass) -> dict[str, str | int | float]:
    """Of a page class that kernels know, by the names that kernels give them: K_FORM, V_BITS, .."""
    found: dict[str, str | int | float] = {}
    for side in SIDES:
        encoding = encoding_of(page_class, side)
        assert encoding is not None
        found |= {f"{side}_{name}".upper(): value for name, value in encoding._asdict().items()}
    return found
