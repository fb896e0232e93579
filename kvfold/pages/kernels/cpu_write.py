"""Write kernel on a CPU, compiled by numba: quantise slots of all layers and heads, of one sequence or many, at once.

It takes what the Triton kernel takes (write.py), and gives the bits that the codecs give: rotations are butterflies,
and no product is fused with a sum. In PyTorch a layer of one sequence takes some hundred operations.

    N stretches: slots of one head that go to adjacent places of one extent   E extents   D head dim   W bytes of a code
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray
from torch import Tensor

from kvfold.codec import fp8, grid
from kvfold.codec.base import SIDES, Side
from kvfold.core import HAS_AVX512_KERNELS
from kvfold.pages.kernels.cpu_jit import compiled, pointer_to
from kvfold.pages.kernels.cpu_threads import run_shared
from kvfold.pages.kernels.encodings import Encoding, encoding_of
from kvfold.pages.layout import PageClass

F32, BF16, FP8, INT = range(4)  # forms of slots
_FLOATS = {torch.float32: F32, torch.bfloat16: BF16}
_HALF, _LARGEST, _LARGEST_FP8 = np.float32(grid.HALF), np.float32(grid.LARGEST), np.float32(fp8.LARGEST)
_LARGEST_BITS = int(_LARGEST.view(np.int32))
_MAGNITUDE = 0x7FFFFFFF
_FEWEST_SLOTS = 1024  # that are worth waking another thread
_K, _V, _MEAN, _K_PLACE, _V_PLACE, _BIAS, _POSITION, _NEW_POSITION, _NEW_BIAS = 0, 1, 2, 3, 6, 9, 10, 11, 12

Floats = NDArray[np.float32]


class SideForm(NamedTuple):
    """How one side is stored; bits, clip and grids of integers only."""

    form: int
    bits: int = 0
    clip: float = 1.0
    num_grids: int = 1


@cache
def side_form(page_class: PageClass, side: Side) -> SideForm | None:
    """None where slots share grids, or there is no kernel."""
    codec = page_class.codec(side)
    if codec.as_floats:
        form = _FLOATS.get(codec.fields(side, page_class.head_dim, page_class.kv_dtype)[0].dtype)
        return None if form is None else SideForm(form)
    found: Encoding | None = encoding_of(page_class, side)
    if found is None or found.span > 1 or found.form == "float":
        return None
    if found.form == "fp8":
        return SideForm(FP8)
    return SideForm(INT, found.bits, found.clip, page_class.head_dim // found.channels)


@cache
def knows(page_class: PageClass) -> bool:
    """Whether the kernel encodes both sides, and nothing else is kept of slots, whose floats are whole words."""
    has_forms = all(side_form(page_class, side) is not None for side in SIDES) and page_class.head_dim % 2 == 0
    return has_forms and page_class.kv_dtype in _FLOATS and not page_class.summaries and page_class.has_positions


@compiled
def _finite(x: Floats) -> None:
    """NaN becomes 0, infinity the slot's largest finite magnitude."""
    bits, most = x.view(np.int32), np.int32(0)
    for d in range(len(x)):
        most = max(most, np.int32(bits[d] & _MAGNITUDE))
    if most <= _LARGEST_BITS:
        return
    reach = np.float32(0)
    for d in range(len(x)):
        if np.isfinite(x[d]):
            reach = max(reach, abs(x[d]))
    reach = min(reach, _LARGEST)
    for d in range(len(x)):
        x[d] = np.float32(0) if np.isnan(x[d]) else min(max(x[d], -reach), reach)


@compiled
def _sums_of_four(x: Floats) -> Any:
    """Two butterflies in one pass: short inner loops take most of the time. Returns how far apart the next ones are."""
    if len(x) % 4:
        return 1
    for d in range(0, len(x), 4):
        a, b, c, e = x[d] + x[d + 1], x[d] - x[d + 1], x[d + 2] + x[d + 3], x[d + 2] - x[d + 3]
        x[d], x[d + 1], x[d + 2], x[d + 3] = a + c, b + e, a - c, b - e
    return 4


if HAS_AVX512_KERNELS:
    from kvfold.pages.kernels.avx512 import LANES, butterflies

    @compiled
    def _first_sums(x: Floats) -> Any:
        """As `_sums_of_four`, with those of whole registers."""
        if len(x) % LANES:
            return _sums_of_four(x)
        butterflies((x.ctypes.data, len(x)))
        return LANES

else:
    _first_sums = _sums_of_four


@compiled
def hadamard_sums(x: Floats) -> None:
    """The sums and differences of codec/hadamard.py, in their order and not scaled."""
    head_dim = len(x)
    block = head_dim & -head_dim
    half = _first_sums(x)
    while half < block:
        for first in range(0, head_dim, 2 * half):
            low, high = x[first : first + half], x[first + half : first + 2 * half]
            for d in range(half):
                a, b = low[d], high[d]
                low[d], high[d] = a + b, a - b
        half *= 2


@compiled
def _rotate(x: Floats) -> None:
    """As codec/hadamard.py does it, bit for bit."""
    hadamard_sums(x)
    root = np.float32(np.sqrt(len(x) & -len(x)))
    for d in range(len(x)):
        x[d] /= root


@compiled
def _ordered(bits: Any) -> Any:
    """Bits of fp32 numbers as integers of the same order, and back."""
    return np.int32(bits ^ ((bits >> 31) & _MAGNITUDE))


@compiled
def _up_to_bf16(x: Any) -> Any:
    """The upper half of the smallest bf16 number that is not below x, as an integer."""
    bits = np.float32(x).view(np.int32)
    return ((bits + 0xFFFF if x > 0 else bits) >> 16) & 0xFFFF


@compiled
def _widened(half: int) -> Any:
    return np.uint32(half << 16).view(np.float32)


@compiled
def to_bf16(bits: int) -> int:
    """The upper half of the nearest bf16 number, ties to even."""
    if (bits & _MAGNITUDE) > 0x7F800000:
        return 0x7FC0
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@compiled
def _to_e4m3(x: Any) -> Any:
    """The code of a number within the format's range, as in encode.py."""
    bits = np.float32(x).view(np.int32)
    size = bits & _MAGNITUDE
    if abs(x) < np.float32(0.015625):
        size = np.float32(abs(x) + np.float32(16384)).view(np.int32) - 0x46800000
    else:
        size = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    return size | ((bits >> 24) & 0x80)


@compiled
def _bounds(x: Floats) -> Any:
    """The least and the largest, by integers: their order lets the compiler take several at once."""
    bits = x.view(np.int32)
    low = high = _ordered(bits[0])
    for d in range(len(x)):
        low = min(low, _ordered(bits[d]))
    for d in range(len(x)):
        high = max(high, _ordered(bits[d]))
    return np.int32(_ordered(low)).view(np.float32), np.int32(_ordered(high)).view(np.float32)


@compiled
def _put_integers(x: Floats, codes: Any, scales: Any, zeros: Any, bits: int, clip: float, steps: Any) -> None:
    """Codes [W], scales and zeros of one slot (codec/grid.py)."""
    top = np.float32((1 << bits) - 1)
    channels = len(x) // len(scales)
    for g in range(len(scales)):
        mine, code = x[g * channels : (g + 1) * channels], steps[g * channels : (g + 1) * channels]
        low, high = _bounds(mine)
        cut = (high - low) * np.float32((1.0 - clip) / 2)
        step, start = (high - low - np.float32(2) * cut) / top, low + cut
        zero = -_widened(_up_to_bf16(-start))
        scales[g], zeros[g] = _up_to_bf16((start + step * top - zero) / top), np.float32(zero).view(np.uint32) >> 16
        scale = _widened(scales[g])
        divisor = scale if scale > 0 else np.float32(1)
        for d in range(channels):
            y = (mine[d] - zero) / divisor + _HALF
            y = y if y > 0 else np.float32(0)
            code[d] = np.int32(y if y < top else top)
    width = len(codes)
    if bits == 8:
        for d in range(width):
            codes[d] = np.uint8(steps[d])
    elif bits == 4:
        low_half, high_half = steps[:width], steps[width:]
        for d in range(width):
            codes[d] = np.uint8(low_half[d] | (high_half[d] << 4))
    else:
        for d in range(width):
            codes[d] = np.uint8(
                steps[d] | (steps[d + width] << 2) | (steps[d + 2 * width] << 4) | (steps[d + 3 * width] << 6)
            )


@compiled
def _put_fp8(x: Floats, codes: Any, scales: Any) -> None:
    reach = np.float32(0)
    for d in range(len(x)):
        reach = max(reach, abs(x[d]))
    scales[0] = _up_to_bf16(reach / _LARGEST_FP8)
    scale = _widened(scales[0])
    divisor = scale if scale > 0 else np.float32(1)
    for d in range(len(x)):
        codes[d] = _to_e4m3(x[d] / divisor)


@compiled
def _load(source: int, form: int, slot: int, x: Floats) -> None:
    size = len(x)
    if form == F32:
        words = carray(pointer_to(source + 4 * slot * size), (size,), np.float32)
        for d in range(size):
            x[d] = words[d]
        return
    halves, bits = carray(pointer_to(source + 2 * slot * size), (size,), np.uint16), x.view(np.uint32)
    for d in range(size):
        bits[d] = np.uint32(halves[d]) << np.uint32(16)


@compiled
def _copy_floats(source: int, form: int, target: int, to: int, size: int) -> None:
    """Floats as they are, or rounded to bf16."""
    if form == to:
        size = size if form == F32 else size // 2  # words
        old, new = carray(pointer_to(source), (size,), np.int32), carray(pointer_to(target), (size,), np.int32)
        for i in range(size):
            new[i] = old[i]
    elif to == BF16:
        words, halves = carray(pointer_to(source), (size,), np.int32), carray(pointer_to(target), (size,), np.uint16)
        for i in range(size):
            halves[i] = to_bf16(words[i])
    else:
        halves, words = carray(pointer_to(source), (size,), np.uint16), carray(pointer_to(target), (size,), np.int32)
        for i in range(size):
            words[i] = np.int32(halves[i]) << 16


@compiled
def _write_side(
    source: int, source_form: int, count: int, mean: int, places: Any, filled: int, head_dim: int, side: Any, room: Any
) -> None:
    """Slots of one stretch; `mean`: where the mean key lies, 0 for values; `places`: of codes, scales and zeros."""
    form, bits, clip, num_grids = side
    x, steps = room
    if form <= BF16:
        width = head_dim * (4 if form == F32 else 2)
        _copy_floats(source, source_form, places[0] + filled * width, form, count * head_dim)
        return
    width = head_dim if form == FP8 else head_dim * bits // 8
    for i in range(count):
        _load(source, source_form, i, x)
        _finite(x)
        if mean:
            x -= carray(pointer_to(mean), (head_dim,), np.float32)
            _rotate(x)
        slot = filled + i
        codes = carray(pointer_to(places[0] + slot * width), (width,), np.uint8)
        scales = carray(pointer_to(places[1] + 2 * slot * num_grids), (num_grids,), np.uint16)
        if form == FP8:
            _put_fp8(x, codes, scales)
        else:
            zeros = carray(pointer_to(places[2] + 2 * slot * num_grids), (num_grids,), np.uint16)
            _put_integers(x, codes, scales, zeros, bits, clip, steps)


@compiled
def _write(
    begin: int,
    end: int,
    item_5N: Any,
    row_EC: Any,
    arena: int,
    head_dim: int,
    source_form: int,
    k_side: Any,
    v_side: Any,
    has_bias: bool,
) -> None:
    """Stretches begin:end."""
    room = np.empty(head_dim, np.float32), np.empty(head_dim, np.int32)
    slot_bytes = head_dim * (4 if source_form == F32 else 2)
    is_seal = row_EC.shape[1] == _POSITION + 1
    for n in range(begin, end):
        row, first, count, filled = row_EC[item_5N[0, n]] + arena, item_5N[1, n], item_5N[2, n], item_5N[4, n]
        skipped = first * slot_bytes
        _write_side(
            row[_K] + skipped, source_form, count, row[_MEAN], row[_K_PLACE:_V_PLACE], filled, head_dim, k_side, room
        )
        _write_side(row[_V] + skipped, source_form, count, 0, row[_V_PLACE:_BIAS], filled, head_dim, v_side, room)
        position = carray(pointer_to(row[_POSITION] + 4 * filled), (count,), np.int32)
        if is_seal:
            for i in range(count):
                position[i] = item_5N[3, n] + i
        else:
            position[:] = carray(pointer_to(row[_NEW_POSITION] + 8 * first), (count,), np.int64)
        if has_bias:
            bias = carray(pointer_to(row[_BIAS] + 4 * filled), (count,), np.float32)
            if is_seal:
                bias[:] = 0
            else:
                bias[:] = carray(pointer_to(row[_NEW_BIAS] + 4 * first), (count,), np.float32)


def write_slots(item_5N: Tensor, row_EC: Tensor, memory: Tensor, page_class: PageClass, source: torch.dtype) -> None:
    """Encode every stretch, of a page class that the kernel knows, from slots in the dtype `source`; items and rows are
    those of write.py."""
    k_side, v_side = (side_form(page_class, side) for side in SIDES)
    assert k_side is not None and v_side is not None
    sizes = memory.data_ptr(), page_class.head_dim, _FLOATS[source]
    rest = item_5N.numpy(), row_EC.numpy(), *sizes, tuple(k_side), tuple(v_side), page_class.has_bias
    run_shared(lambda begin, end: _write(begin, end, *rest), _shared_out(item_5N[2].numpy(), torch.get_num_threads()))


def _shared_out(count_N: NDArray[np.int32], num_threads: int) -> list[int]:
    """Where the stretches of each thread begin, and the end: about as many slots for each."""
    end_N = np.cumsum(count_N)
    if num_threads < 2 or end_N[-1] < _FEWEST_SLOTS:
        return [0, len(count_N)]
    inner = np.searchsorted(end_N, end_N[-1] * np.arange(1, num_threads) / num_threads)
    return [0, *(int(at) for at in inner), len(count_N)]
