"""Scheduler input and output: jobs, the sources of their sequences (prefix cache hits), and events.

A job's listener is called in the scheduler's thread and must return at once; a job whose listener raises fails. Every
submitted job ends with exactly one `Ended`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvfold.engine.output_processor import StopReason
from kvfold.engine.sampling import Sampling
from kvfold.errors import InputError
from kvfold.pages.sequence import SequenceCache
from kvfold.store.key import PAGE_LEN

_log = logging.getLogger("kvfold.engine")

EndReason = StopReason | Literal["read", "cancelled", "late", "failed"]


@dataclass(frozen=True)
class PrefillDone:
    """Prefill is done; `num_reused` prompt tokens came from the prefix cache."""

    num_reused: int


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class Ended:
    """`stop`: the stop string that was found. `error`: why the job failed."""

    reason: EndReason
    num_tokens: int = 0
    stop: str | None = None
    error: Exception | None = None


Event = PrefillDone | TextDelta | Ended
Listener = Callable[[Event], None]


@dataclass(frozen=True)
class SequenceStart:
    """A sequence that holds the first `num_read` tokens (the prefix cache hit), and the lengths at which prefill stops.
    Layers of the hit may still be loading; if one is lost, the job starts again.

    A policy compresses at each of the `cuts`; tokens after the last cut stay uncompressed. None: it compresses at the
    end of the prompt. A lossless policy stops at none of them.
    """

    sequence: SequenceCache
    num_read: int = 0
    cuts: Sequence[int] | None = None


class Source(Protocol):
    """Where a job's sequence comes from; called in the scheduler's thread."""

    def begin(self) -> SequenceStart:
        """A new sequence of the job's own; OutOfPages if there is no memory for one."""

    def lost(self) -> None:
        """A layer of the prefix cache hit could not be loaded; the job starts again. After a few losses a source begins
        without a hit, so no job restarts forever."""

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        """Prefill has reached a cut or the end of the prompt, after `num_read` tokens; a sequence of a lossless policy
        may hold more."""

    def began(self) -> None:
        """Prefill is done: decoding starts."""


@dataclass(frozen=True)
class PrefixSharing:
    """Jobs of the same `scope` may share the KV cache of a common prefix while they run (shared_prefix.py).

    Lossless policies share any prefix (`saved` is None), others those that their sources save: each of `saved` has the
    lengths of all compressions up to such a prefix, the last one its own.
    """

    scope: str
    saved: Collection[tuple[int, ...]] | None = None


@dataclass(eq=False)
class Job:
    """A prompt and its sampling parameters; `max_new_tokens` 0 only prefills. `deadline`: on the scheduler's clock."""

    tokens: Sequence[int]
    source: Source
    listener: Listener
    max_new_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: Sequence[str] = ()
    tenant: str = ""
    deadline: float | None = None
    has_seed: bool = False  # whether the seed is the client's
    ignores_eos: bool = False  # decode goes on to max_new_tokens or a stop string
    in_chunks: bool | None = None  # how its policy prefills, where that is not the scheduler's
    is_streamed: bool = True  # else its whole text comes at its end
    sharing: PrefixSharing | None = None
    number: int = field(default=0, init=False)  # in the order in which jobs were submitted
    is_cancelled: bool = field(default=False, init=False)
    has_ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        if not self.tokens:
            raise InputError("the prompt holds no tokens; give at least one")
        if self.max_new_tokens < 0:
            raise InputError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 0")
        if isinstance(self.stop, str) or not all(self.stop):
            raise InputError("stop is a list of non-empty strings")

    @cached_property
    def ids_N(self) -> NDArray[np.int64]:
        """The tokens as an array."""
        return np.array(self.tokens, dtype=np.int64)

    @cached_property
    def first_page(self) -> bytes:
        """The tokens of the first page: jobs in which they differ share no prefix."""
        return self.ids_N[:PAGE_LEN].tobytes()

    def end(self, ended: Ended) -> None:
        """Tell the listener, once; an exception in it is only logged."""
        if self.has_ended:
            return
        self.has_ended = True
        try:
            self.listener(ended)
        except Exception:
            _log.exception("a listener raised when it was told of its job's end")
