"""Programmatic dependent launch (PDL): a kernel begins while the one before it still runs, on NVIDIA GPUs from compute
capability 9.0 on (CUDA programming guide; PTX griddepcontrol).

A layer's attention takes about 20 microseconds over an eighth of 128k tokens, so the microseconds between two kernels
count. A kernel that begins early reads what was there before the step (tables, fill counts, stored slots), then waits
until all kernels before it have ended, then reads what they wrote. Two rules keep that right, whatever stands between:

- every program waits before it writes, ends, or lets the next kernel begin;
- nothing that is read before the wait was written by the operation right before.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def wait_for_earlier(EARLY: tl.constexpr) -> None:
    """What kernels before this one wrote is there now."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin(EARLY: tl.constexpr) -> None:
    """Once every program has said so; the next kernel may then take the room that is left on the chip."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


def begins_early(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch.version.cuda is not None and _has_it(tensor.device)


@cache
def _has_it(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(is_early: bool) -> dict[str, bool]:
    """For a kernel that waits; the interpreter and other GPUs know no such option."""
    return {"launch_pdl": True} if is_early else {}
