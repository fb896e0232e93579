"""What a scheduler is given and what it tells: jobs, where their sequences begin, and events on their way.

A job's listener is called in the scheduler's thread and must return at once; a job whose listener raises fails. Every
job that was taken ends with exactly one `Ended`, whatever happens to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvfold.engine.request import StopReason
from kvfold.engine.sampling import Sampling
from kvfold.errors import InputError
from kvfold.pages.sequence import SequenceCache

_log = logging.getLogger("kvfold.engine")

EndReason = StopReason | Literal["read", "cancelled", "late", "failed"]


@dataclass(frozen=True)
class Began:
    """The prompt has been read; `num_reused` of its tokens were not computed."""

    num_reused: int


@dataclass(frozen=True)
class Wrote:
    """Text that is final now."""

    text: str


@dataclass(frozen=True)
class Ended:
    """`stop`: the stop string that was found. `error`: why the job failed."""

    reason: EndReason
    num_tokens: int = 0
    stop: str | None = None
    error: Exception | None = None


Event = Began | Wrote | Ended
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Begin:
    """A sequence that has read the first `num_read` tokens, and the lengths at which reading makes a stop. Layers of
    what it has read may still be on their way; if one is lost, the job begins again.

    A policy compresses at each of the `cuts`, and what follows the last one is kept whole, which is everything where
    there are none; with None for cuts it compresses at the end of the prompt.
    """

    sequence: SequenceCache
    num_read: int = 0
    cuts: Sequence[int] | None = None


class Source(Protocol):
    """Where a job's sequence begins; called in the scheduler's thread."""

    def begin(self) -> Begin:
        """A sequence of the job's own; OutOfPages if there is no memory for one."""

    def lost(self) -> None:
        """What the last sequence began with was lost on its way, and the job begins again. A source that is told so a
        few times begins with nothing: no job begins again for ever."""

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        """The sequence has just read so many tokens, at a cut or at the end of the prompt."""

    def began(self) -> None:
        """The whole prompt is read: the reply starts now."""


@dataclass(eq=False)
class Job:
    """A prompt and how to continue it; `max_new_tokens` 0 only reads. `deadline` is a time of the scheduler's clock."""

    tokens: Sequence[int]
    source: Source
    listener: Listener
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    tenant: str = ""
    deadline: float | None = None
    is_cancelled: bool = field(default=False, init=False)
    has_ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InputError("the prompt holds no tokens; give at least one")
        if self.max_new_tokens < 0:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 0")
        if isinstance(self.stop, str) or not all(self.stop):
            raise InputError("stop is a list of non-empty strings")

    def end(self, ended: Ended) -> None:
        """Tell the listener, once; what it raises now has nobody left to tell."""
        if self.has_ended:
            return
        self.has_ended = True
        try:
            self.listener(ended)
        except Exception:
            _log.exception("a listener raised when it was told of its job's end")
