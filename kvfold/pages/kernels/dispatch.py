"""Which kernel writes slots to an arena: Triton's on a GPU, numba's on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from kvfold.core import HAS_NUMBA, HAS_TRITON
from kvfold.pages.kernels import encodings
from kvfold.pages.layout import PageClass


def uses_numba(memory: Tensor) -> bool:
    return not memory.is_cuda and HAS_NUMBA


def is_there(memory: Tensor) -> bool:
    """Whether there is a compiler for this memory."""
    return HAS_TRITON if memory.is_cuda else HAS_NUMBA


def knows(page_class: PageClass, memory: Tensor) -> bool:
    """Whether the kernel encodes both sides of slots of this class."""
    if not uses_numba(memory):
        return encodings.knows(page_class)
    from kvfold.pages.kernels import cpu_write  # the file needs numba

    return cpu_write.knows(page_class)


def write_slots(
    item_5N: Tensor,
    row_EC: Tensor,
    memory: Tensor,
    page_class: PageClass,
    source: torch.dtype,
    *,
    block: int,
    most_slots: int,
) -> None:
    """Encode stretches of slots in the dtype `source`, on a GPU that of the cache; the rest is told in write.py."""
    if uses_numba(memory):
        from kvfold.pages.kernels import cpu_write

        cpu_write.write_slots(item_5N, row_EC, memory, page_class, source)
        return
    from kvfold.pages.kernels.write import write_slots as write  # the file needs triton

    write(item_5N, row_EC, memory, page_class, block=block, most_slots=most_slots)
