"""Prefill time slice between two decode steps, which bounds the inter-token latency while long prompts prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

_SHARE = 4  # prefill time over decode-step time: a fifth of the time goes to decoding
_LEAST_S, _SOON_S, _MOST_S = 0.02, 0.2, 1.0
_DEPTH = 2  # parts of a pass that may be queued on the GPU when the clock is read


class TimeSlice:
    """A slice is four times as long as the last step took, within 0.02 and 0.2 s; where steps take longer than that, as
    long as a step, at most 1 s. `fixed_s` overrides it."""

    def __init__(self, clock: Callable[[], float], device: torch.device, fixed_s: float | None = None) -> None:
        self._clock = clock
        self._is_cuda = device.type == "cuda"
        self._fixed_s = fixed_s
        self._step_s = _SOON_S
        self._end = 0.0
        self._queued: deque[torch.cuda.Event] = deque()

    @property
    def length_s(self) -> float:
        if self._fixed_s is not None:
            return self._fixed_s
        most = min(max(_SOON_S, self._step_s), _MOST_S)
        return min(max(_SHARE * self._step_s, _LEAST_S), most)

    def begin(self) -> None:
        self._end = self._clock() + self.length_s

    def stepped(self, seconds: float) -> None:
        """The last decode step took so long."""
        self._step_s = seconds

    def is_over(self) -> bool:
        """Asked after each part of a pass."""
        if self._is_cuda:
            self._follow_device()
        return self._clock() >= self._end

    def _follow_device(self) -> None:
        """Kernel launches return at once: wait for the device up to the last `_DEPTH` parts, which keep it busy."""
        event = torch.cuda.Event()
        event.record()
        self._queued.append(event)
        if len(self._queued) > _DEPTH:
            self._queued.popleft().synchronize()
