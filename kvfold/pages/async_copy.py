"""Asynchronous copies between host and device through pinned memory, and indices of known number.

An ordinary copy from the host's memory, a `tolist` and a `nonzero` all end only when the device has done everything
that was queued before; then it stands idle until the host has caught up. A copy through page-locked memory joins the
queue like any other work.

    X entries of a mask
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(values: Sequence[int], device: torch.device) -> Tensor:
    """int64 [len(values)] on the device."""
    host = torch.tensor(values, dtype=torch.int64)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def sent(array: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> Tensor:
    """On the device, without waiting for it."""
    return staged(array, device).to(device, non_blocking=True)


def staged(array: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> Tensor:
    """Where the device fetches it from by itself: in pinned memory, which is not used again before it has."""
    found = torch.from_numpy(array)
    return found.pin_memory() if device.type == "cuda" else found


class Download:
    """A tensor on its way to the host; asking for it waits for what was queued before it, for nothing behind it."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor.to("cpu", non_blocking=True)  # page-locked, as it comes from a device
        self._done = torch.cuda.Event() if tensor.is_cuda else None
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._host


def indices(mask_X: Tensor, count: int) -> Tensor:
    """Where a mask is true, ascending, for a caller who knows at how many places that is."""
    return mask_X.nonzero_static(size=count).flatten()


def row_numbers(counts: Sequence[int], device: torch.device) -> Tensor:
    """int64 [sum(counts)]: row r, counts[r] times, for every row."""
    row_R = torch.arange(len(counts), device=device)
    return torch.repeat_interleave(row_R, upload(counts, device), output_size=sum(counts))
