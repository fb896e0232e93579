"""Where does the time of a prefill go: phase by phase on the device and on the host, and where the device stood idle?

Phases are functions of the package, watched from outside while a context lasts. Time counts for the innermost one, so
that phases add up to the run; idle time of the device counts for the phase that kept it waiting.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch

from kvfold.compression.round import CompressionRound
from kvfold.passes import prefill
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy

MODEL = "model"  # what no other phase is: projections, MLP, norms, embedding and head
Times = dict[str, float]


class Phases:
    """Milliseconds by phase, of every run inside `watching`."""

    def __init__(self, *, device: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._stack = [MODEL]
        self._marks: list[tuple[str, float, Any]] = []  # (phase that ends here, host seconds, device event)

    @contextmanager
    def watching(self, watched: Sequence[tuple[Any, str, str]]) -> Iterator[None]:
        """`watched`: owner, name of its function, phase. Everything is as it was afterwards."""
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in watched]
        try:
            for owner, name, phase in watched:
                setattr(owner, name, self._wrapped(getattr(owner, name), phase))
            self._mark(MODEL)
            yield
            self._mark(MODEL)
        finally:
            for owner, name, function in before:
                setattr(owner, name, function)

    def _wrapped(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._mark(self._stack[-1])
            self._stack.append(phase)
            try:
                return function(*args, **kwargs)
            finally:
                self._mark(self._stack.pop())

        return run

    def _mark(self, ending: str) -> None:
        event = torch.cuda.Event(enable_timing=True) if self._device else None
        if event is not None:
            event.record()
        self._marks.append((ending, self._clock(), event))

    def host_ms(self) -> Times:
        """Until the host had queued a phase's work and, where it asks for an answer, got it."""
        return self._sum(lambda a, b: 1e3 * (b[1] - a[1]))

    def device_ms(self) -> Times:
        torch.cuda.synchronize()
        return self._sum(lambda a, b: float(a[2].elapsed_time(b[2])))

    def _sum(self, between: Callable[[Any, Any], float]) -> Times:
        total: Times = defaultdict(float)
        for begin, end in zip(self._marks, self._marks[1:], strict=False):
            total[end[0]] += between(begin, end)
        return dict(total)


def prefill_phases(policy: Policy) -> list[tuple[Any, str, str]]:
    """What to watch of a prefill under a policy."""
    return [
        (PrefillPass, "attend", "attention"),
        (prefill, "observe_queries", "observing"),
        (CompressionRound, "select", "choosing"),
        (CompressionRound, "evict", "choosing"),
        (type(policy.prefill.score), "score", "scoring"),
        (PrefillPass, "finish", "writing"),
    ]


class Interval(Protocol):
    """A profiler's event, as far as it is looked at here."""

    @property
    def name(self) -> str: ...

    @property
    def time_range(self) -> Any: ...


def gaps(kernels: Iterable[Interval], shortest_us: float = 5.0) -> list[tuple[float, int, str]]:
    """Idle stretches of the device: (microseconds, how many, "kernel before -> kernel after"), longest sum first."""
    total: dict[str, list[float]] = defaultdict(list)
    last: Interval | None = None
    for kernel in sorted(kernels, key=lambda kernel: kernel.time_range.start):
        if last is not None and kernel.time_range.start - last.time_range.end >= shortest_us:
            name = f"{last.name[:60]} -> {kernel.name[:60]}"
            total[name].append(kernel.time_range.start - last.time_range.end)
        if last is None or kernel.time_range.end > last.time_range.end:
            last = kernel
    return sorted(((sum(us), len(us), name) for name, us in total.items()), reverse=True)
