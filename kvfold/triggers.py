"""Triggers: when slots are evicted. They read host counters only, so no step waits for the device.

The prefill has one trigger and decoding another. Defaults: after the prompt (`after_prefill`); while decoding
`on_overflow` for absolute sizes (`2048tok`, `512MB`: a bound is a bound), never for relative ones (`8x`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvfold.policy.registry import Term, register


@dataclass(frozen=True)
class Counters:
    """Host-side facts at the moment an open block is full."""

    stored_len: int  # slots a compressible head holds on average, rounded up, open block included
    target_len: int  # slots per head the size allows on average, at least what must stay
    since_last: int  # tokens committed since the last compression


class Trigger(Term):
    """A choice of the `when` axis for one phase."""

    phase: ClassVar[Literal["prefill", "decode"]]
    can_fire: ClassVar[bool] = True
    repeats: ClassVar[bool] = True  # more than once a call, so that slots already stored are evicted

    @property
    def chunk_len(self) -> int | None:
        """Prompt tokens after which a prefill compresses (chunked prefill); None: at the end of the prompt."""
        return None

    def due(self, counters: Counters) -> bool:
        """Whether to evict when an open block is sealed; False for triggers of the prefill."""
        return False


@register("when", "after_prefill")
@dataclass(frozen=True)
class AfterPrefill(Trigger):
    """Once, when the whole input of a call has been read; the result is that of a one-shot prefill."""

    phase: ClassVar[Literal["prefill", "decode"]] = "prefill"
    repeats: ClassVar[bool] = False


@register("when", "between_chunks")
@dataclass(frozen=True)
class BetweenChunks(Trigger):
    """After every `chunk` prompt tokens: bounded memory for prompts of any length."""

    chunk: int = 512
    phase: ClassVar[Literal["prefill", "decode"]] = "prefill"

    @property
    def chunk_len(self) -> int | None:
        return self.chunk


@register("when", "never")
@dataclass(frozen=True)
class Never(Trigger):
    """Decoded tokens are kept and reported apart."""

    phase: ClassVar[Literal["prefill", "decode"]] = "decode"
    can_fire: ClassVar[bool] = False
    repeats: ClassVar[bool] = False


@register("when", "on_overflow")
@dataclass(frozen=True)
class OnOverflow(Trigger):
    """While decoding, whenever a full open block would take the average head over the size."""

    phase: ClassVar[Literal["prefill", "decode"]] = "decode"

    def due(self, counters: Counters) -> bool:
        return counters.stored_len > counters.target_len


@register("when", "every")
@dataclass(frozen=True)
class Every(Trigger):
    """While decoding, at the first full open block after every `tokens` committed tokens."""

    tokens: int = 128
    phase: ClassVar[Literal["prefill", "decode"]] = "decode"

    def due(self, counters: Counters) -> bool:
        return counters.since_last >= self.tokens and counters.stored_len > counters.target_len
