"""The arena: the block pool of the paged KV cache, allocated in runs of superblocks; addresses never move.

A *superblock* is the unit the arena counts in. A *span* is a run of adjacent superblocks allocated to one page class:
it holds `num_pages` pages laid out field by field, so that adjacent pages form one dense array per field:

    span: | k of page 0, 1, 2 … | v of page 0, 1, 2 … | positions of page 0, 1, 2 … | … padding |

Readers then see a head's adjacent pages as one [slots, D] tensor, without a gather. A span is returned whole.
"""

from __future__ import annotations

import mmap
import sys
from bisect import bisect_left, insort
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import RLock
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from kvfold.errors import InputError, OutOfPages
from kvfold.pages.layout import PageClass
from kvfold.policy.size import bytes_text

SUPERBLOCK_BYTES = 64 * 1024
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.13 names it
FreeRun = tuple[int, int]  # start and length; free ones are sorted and never adjacent
_Value = TypeVar("_Value")


class Arena:
    """Allocates and frees spans; `free_bytes + used_bytes == capacity_bytes` always holds."""

    def __init__(
        self, capacity_bytes: int, *, device: torch.device | str = "cpu", superblock_bytes: int = SUPERBLOCK_BYTES
    ) -> None:
        if superblock_bytes < 4096 or superblock_bytes % 4096:
            raise InputError(f"superblock_bytes is {superblock_bytes}; it must be a positive multiple of 4096")
        self.superblock_bytes = superblock_bytes
        self.num_superblocks = capacity_bytes // superblock_bytes
        if self.num_superblocks < 1:
            raise InputError(f"an arena of {capacity_bytes} bytes holds no superblock of {superblock_bytes} bytes")
        self.device = torch.device(device)
        with torch.inference_mode(False):  # whoever is outside of it writes, too
            self.memory = _reserve(self.num_superblocks * superblock_bytes, self.device)
        self._free: list[FreeRun] = [(0, self.num_superblocks)]
        self._num_free = self.num_superblocks
        self.peak_bytes = 0
        self._lock = RLock()  # of sessions in several threads; a finalizer may free within an allocation
        self._interned: dict[Any, Any] = {}
        self.derived: dict[Any, Any] = {}  # by sequences: what all of one policy have

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Also called by `copy`: a copy would take as much memory again, and hand out spans that are in use."""
        raise InputError(
            f"an arena of {self.capacity_bytes} bytes is neither copied nor pickled; fork the session or cache in it"
        )

    def intern(self, value: _Value) -> _Value:
        """One object for all equal values of sequences in this arena (page classes, layouts), compared by identity."""
        found: _Value = self._interned.setdefault(value, value)
        return found

    @property
    def capacity_bytes(self) -> int:
        return self.num_superblocks * self.superblock_bytes

    @property
    def free_bytes(self) -> int:
        return self._num_free * self.superblock_bytes

    @property
    def used_bytes(self) -> int:
        return self.capacity_bytes - self.free_bytes

    def reset_peak(self) -> None:
        """Count `peak_bytes` from now on."""
        self.peak_bytes = self.used_bytes

    def allocate(self, page_class: PageClass, num_pages: int, *, whole: bool = False) -> list[Span]:
        """Spans with at least num_pages pages in all: one if a run is long enough (`whole`: one or none), else the
        largest runs there are. Raises OutOfPages, with nothing allocated, if they do not fit.
        """
        with self._lock:
            return self._allocate(page_class, num_pages, whole)

    def _allocate(self, page_class: PageClass, num_pages: int, whole: bool) -> list[Span]:
        spans: list[Span] = []
        missing = num_pages
        while missing > 0:
            span = self._allocate_run(page_class, missing)
            if span is None or (whole and span.num_pages < missing):
                spans += [span] if span is not None else []
                for taken in spans:
                    self.free(taken)
                raise OutOfPages(
                    f"the arena (KV-cache memory) of {bytes_text(self.capacity_bytes)} has "
                    f"{bytes_text(self.free_bytes)} free, but {bytes_text(page_class.span_bytes(num_pages))} are "
                    f"needed; {OutOfPages.ADVICE}"
                )
            spans.append(span)
            missing -= span.num_pages
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return spans

    def free(self, span: Span) -> None:
        """Free a span; adjacent free runs are joined."""
        with self._lock:
            _free_run(self._free, span.start, span.num_superblocks)
            self._num_free += span.num_superblocks

    def _allocate_run(self, page_class: PageClass, num_pages: int) -> Span | None:
        """A span of num_pages or, where no run is that long, of the longest run; its superblocks are filled up."""
        if not self._free:
            return None
        wanted = -(-page_class.span_bytes(num_pages) // self.superblock_bytes)
        fitting = [run for run in self._free if run[1] >= wanted]
        if fitting:
            start, length = min(fitting, key=lambda run: (run[1], run[0]))
        else:
            start, length = max(self._free, key=lambda run: (run[1], -run[0]))
            wanted = length
        fits = page_class.pages_in(wanted * self.superblock_bytes)
        if fits == 0:
            return None
        _take_run(self._free, (start, length), wanted)
        self._num_free -= wanted
        return Span(self, page_class, start, wanted, fits)


@dataclass(eq=False)
class Span:
    """Adjacent superblocks allocated to one page class, and which of its pages are free."""

    arena: Arena
    page_class: PageClass
    start: int
    num_superblocks: int
    num_pages: int
    _free: list[FreeRun] = field(init=False)

    def __post_init__(self) -> None:
        self._free = [(0, self.num_pages)]

    @cached_property
    def addresses(self) -> dict[str, int]:
        """Name of a field -> bytes from the start of the arena."""
        found, offset = {}, self.start * self.arena.superblock_bytes
        for item, num_rows in self.page_class.regions(self.num_pages):
            found[item.name] = offset
            offset += self.page_class.aligned(num_rows * item.bytes())
        return found

    @cached_property
    def fields(self) -> dict[str, Tensor]:
        """Name -> [slots or groups of the whole span, width]; kernels go by addresses and never ask."""
        found = {}
        with torch.inference_mode(False):  # views that are made inside of it could not be written to outside
            for item, num_rows in self.page_class.regions(self.num_pages):
                offset = self.addresses[item.name]
                raw = self.arena.memory[offset : offset + num_rows * item.bytes()]
                found[item.name] = raw.view(item.dtype).view(num_rows, item.width)
        return found

    @property
    def num_bytes(self) -> int:
        return self.num_superblocks * self.arena.superblock_bytes

    @property
    def num_free_pages(self) -> int:
        return sum(length for _, length in self._free)

    def allocate_pages(self, num_pages: int) -> tuple[int, int] | None:
        """(first page, how many): the first run of num_pages, or the longest there is; None when full."""
        if not self._free:
            return None
        run = next((run for run in self._free if run[1] >= num_pages), None)
        run = run or max(self._free, key=lambda run: (run[1], -run[0]))
        taken = min(num_pages, run[1])
        _take_run(self._free, run, taken)
        return run[0], taken

    def free_pages(self, first: int, num_pages: int) -> None:
        """Free pages of this span; adjacent free runs are joined."""
        _free_run(self._free, first, num_pages)


def _reserve(num_bytes: int, device: torch.device) -> Tensor:
    """Memory whose addresses never move. On a CPU the system commits it when it is first written, and Linux does not
    count the rest: otherwise the arenas of two models, each half of the memory, keep the process from forking."""
    if device.type != "cpu" or sys.platform != "linux":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    reserved = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    with suppress(OSError):  # a kernel without huge pages
        reserved.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(reserved, dtype=torch.uint8)


def _take_run(free: list[FreeRun], run: FreeRun, count: int) -> None:
    """Take the first of a free run."""
    free.remove(run)
    if run[1] > count:
        insort(free, (run[0] + count, run[1] - count))


def _free_run(free: list[FreeRun], start: int, length: int) -> None:
    at = bisect_left(free, (start, 0))
    if at < len(free) and free[at][0] == start + length:
        length += free.pop(at)[1]
    if at > 0 and sum(free[at - 1]) == start:
        before_start, before_length = free.pop(at - 1)
        start, length = before_start, before_length + length
    insort(free, (start, length))
