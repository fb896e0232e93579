"""Batches of windows: contexts are prefilled a few at a time until the arena or a pass is full, then labelled."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvfold.errors import OutOfPages
from kvfold.pages.sequence import SequenceCache
from kvfold.train.label_pass import LabelInput, Labeller
from kvfold.train.label_rows import Rows

_PASS_TOKENS = {"cpu": 1024, "cuda": 16384}  # fed in a batch, unless a number of windows is given
_PREFILL_TOKENS = {"cpu": 1024, "cuda": 8192}  # of contexts that are prefilled together


class LabelledBatch(NamedTuple):
    """The rows of the next windows, and the bytes that their caches took."""

    num_windows: int
    rows: Rows
    cache_bytes: int


class LabelBatches:
    """Iterates over the labels of windows in their order. `batch`: windows in a pass; without it, as many as a pass of
    some thousand tokens holds. Both are cut to what fits into the arena."""

    def __init__(self, labeller: Labeller, windows: Sequence[LabelInput], batch: int | None = None) -> None:
        self._labeller, self._windows, self._batch = labeller, windows, batch
        device = labeller.runner.arena.device.type
        self._pass_tokens, self._prefill_tokens = _PASS_TOKENS[device], _PREFILL_TOKENS[device]
        self._most = batch or sys.maxsize  # windows that are held at once
        self._most_together = sys.maxsize  # windows whose contexts are prefilled together
        self._begin = 0
        self._held: list[SequenceCache] = []

    def __iter__(self) -> Iterator[LabelledBatch]:
        try:
            while self._begin < len(self._windows):
                if not self._read_more():
                    yield self._label()
        finally:
            self._release()

    def _read_more(self) -> bool:
        """Prefill the next contexts; False if what is held is to be labelled first."""
        group = self._next_group()
        if not group:
            return False
        try:
            self._held += self._labeller.read(group)
        except OutOfPages:
            if len(group) > 1:
                self._most_together = len(group) // 2
            elif self._held:
                self._most, self._most_together = len(self._held), sys.maxsize
                return False
            else:
                raise
        return True

    def _next_group(self) -> Sequence[LabelInput]:
        begin = self._begin + len(self._held)
        fed = sum(len(window.fed) for window in self._windows[self._begin : begin])
        cached, end, most_together = 0, begin, min(self._most_together, self._num_fitting())
        for window in self._windows[begin:]:
            fed, cached = fed + len(window.fed), cached + len(window.cached)
            is_full = self._batch is None and fed > self._pass_tokens and end > self._begin
            is_long = cached > self._prefill_tokens and end > begin
            if is_full or is_long or end - self._begin >= self._most or end - begin >= most_together:
                break
            end += 1
        return self._windows[begin:end]

    def _num_fitting(self) -> int:
        """How many more contexts as large as the largest one held should fit; a prefill that does not fit is lost."""
        largest = max((cache.resident_bytes for cache in self._held if cache.logical_len), default=0)
        return self._labeller.runner.arena.free_bytes // largest if largest else sys.maxsize

    def _label(self) -> LabelledBatch:
        held = self._windows[self._begin : self._begin + len(self._held)]
        num_bytes = sum(cache.resident_bytes for cache, window in zip(self._held, held, strict=True) if window.cached)
        found = LabelledBatch(len(held), self._labeller.label(held, self._held), num_bytes)
        self._begin += len(held)
        self._release()
        return found

    def _release(self) -> None:
        for cache in self._held:
            cache.release()
        self._held = []
