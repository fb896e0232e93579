"""Formats that attention kernels dequantise: codecs by the names that operators take, from `Codec.kernel`.

Nothing here needs triton.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from kvfold.codec import Codec, Fp8, Int2, Int4, Int8, Kivi2, Kivi4, Native
from kvfold.codec.base import Field
from kvfold.errors import InputError
from kvfold.policy.registry import term_of

Form = Literal["float", "fp8", "int"]

# Columns of a task. Addresses are byte offsets into the arena's memory; MASS is an element offset. Tiles are aligned in
# memory, so a task may begin with slots that are not its own: SKIP of its LENGTH, fewer than a tile has.
QUERY, LENGTH, K_CODE, K_SCALE, K_ZERO, V_CODE, V_SCALE, V_ZERO, BIAS, MASS, SKIP = range(11)
NUM_COLUMNS = 11


class SideFormat(NamedTuple):
    """A side (keys or values) of tasks, as kernels are compiled for it: K or V there."""

    head_dim: int
    form: Form
    bits: int
    words: int  # of a slot's codes
    pad: int  # the same padded to a power of two
    groups: int  # scales in a row of metadata
    span: int  # slots that share a row


class Format(NamedTuple):
    """`codec` reads the same bytes in torch; `key_span`: consecutive slots that share the scales of a key channel."""

    codec: Codec
    form: Form
    dtype: torch.dtype
    bits: int
    key_span: int = 1

    def width(self, head_dim: int) -> int:
        """Elements of `dtype` that one slot's codes take."""
        return head_dim if self.form != "int" else head_dim * self.bits // 8

    @property
    def word_dtype(self) -> torch.dtype:
        """As kernels load codes: packed ones by 16 bits, which tensor cores' operands are made of."""
        return self.dtype if self.form == "float" else torch.int16

    def num_words(self, head_dim: int) -> int:
        """Elements of `word_dtype` that one slot's codes take."""
        num_bytes = self.width(head_dim) * self.dtype.itemsize
        if num_bytes % self.word_dtype.itemsize:
            raise InputError(
                f"codes of {self.bits} bits for head dim {head_dim} end within a 16-bit word; kernels read head dims "
                f"that are multiples of {16 // self.bits}, use the plain reader for this model"
            )
        return num_bytes // self.word_dtype.itemsize

    def groups(self, head_dim: int, channel_groups: int, *, is_key: bool) -> int:
        """Scales in one row of metadata: a row serves one slot, or the slots of a span with a scale per channel."""
        return head_dim if is_key and self.key_span > 1 else channel_groups

    def side(self, head_dim: int, channel_groups: int, *, is_key: bool) -> SideFormat:
        words, groups = self.num_words(head_dim), self.groups(head_dim, channel_groups, is_key=is_key)
        span = self.key_span if is_key else 1
        return SideFormat(head_dim, self.form, self.bits, words, padded(words, 16), groups, span)


def padded(count: int, least: int) -> int:
    """Sides of a dot are powers of two: from 8 on for queries, from 16 on for words."""
    return max(least, 1 << (count - 1).bit_length())


def _packed(codec: Codec) -> Format:
    kernel = codec.kernel
    assert kernel is not None
    return Format(codec, kernel.form, torch.uint8, kernel.bits, codec.group("k"))


FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_FORMATS: dict[str, Format] = {
    **{name: Format(Native(), "float", dtype, dtype.itemsize * 8) for name, dtype in FLOATS.items()},
    **{term_of(codec).name: _packed(codec) for codec in (Fp8(), Int8(), Int4(), Int2(), Kivi4(), Kivi2())},
}
CODECS = frozenset(_FORMATS)
_FLOAT_NAMES = {dtype: name for name, dtype in FLOATS.items()}


def format_of(codec: str) -> Format:
    if codec not in _FORMATS:
        raise InputError(f'kernels read no codec "{codec}"; they read {", ".join(_FORMATS)}')
    return _FORMATS[codec]


def float_dtype(name: str) -> torch.dtype:
    """The dtype of an open block."""
    if name not in FLOATS:
        raise InputError(f'an open block cannot be of "{name}"; it is of {", ".join(FLOATS)}')
    return FLOATS[name]


def float_name(dtype: torch.dtype) -> str:
    return _FLOAT_NAMES[dtype]


def codec_name(codec: Codec, kv_dtype: torch.dtype) -> str:
    """As kernels know it, whether or not they do; floats go by their dtype."""
    name = term_of(codec).name
    return _FLOAT_NAMES.get(kv_dtype, name) if name == "native" else name


def num_groups(scale: Field | None) -> int:
    """Channel groups of a slot that have scales of their own; scales that slots share count as one."""
    return scale.width if scale is not None and scale.per == "slot" else 1
