"""Usage of a prompt that an engine computes, by the vendors' contracts, and which prefix of it is packed.

The contract's view of the cache (which markers were written, and until when they live) is this server's own record; the
KV caches are the engine's, which may evict them at any time. Usage counts the tokens of the prompt, not placeholders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from kvfold.serve.cache.breakpoints import Boundary, CachePlan
from kvfold.serve.cache.source import Entries, PlainSource
from kvfold.serve.cache.usage import usage_of


def pack_boundary(boundaries: Sequence[Boundary], least: int) -> Boundary | None:
    """Where the packed prefix of a prompt ends: it has `least` tokens or more, and the last block stays behind it.

    Of a conversation that grows the prefix is packed anew when it has doubled, so that all packing together prefills
    at most twice its tokens. The place depends on the prompt alone.
    """
    found: Boundary | None = None
    for boundary in boundaries[:-1]:
        if boundary.end >= (least if found is None else 2 * found.end):
            found = boundary
    return found


class EngineSource(PlainSource):
    """`entries`: of the request's tenant. `salt`: keeps the engine's prefix cache apart; empty: it is shared."""

    def __init__(
        self,
        num_tokens: int,
        plan: CachePlan,
        entries: Entries,
        at: float,
        clock: Callable[[], float],
        *,
        packed: Boundary | None,
        salt: str,
    ) -> None:
        super().__init__(_no_sequence, num_tokens)
        self.packed, self.salt = packed, salt
        self._num_tokens, self._plan, self._entries, self._at, self._clock = num_tokens, plan, entries, at, clock
        self._num_hit = 0

    def look_up(self) -> None:
        """The longest prefix under a live marker counts as read."""
        if not self._plan.writes and not self._plan.candidates:
            return
        self.miss = "absent"
        for boundary in self._plan.candidates:
            missed = self._entries.miss_reason(boundary.digest, self._clock())
            if missed is None:
                self._entries.touch(boundary.digest, self._at)
                self._num_hit, self.miss = boundary.end, None
                break
            self.miss = "expired" if "expired" in (missed, self.miss) else "absent"
        self.usage = usage_of(self._num_tokens, self._num_hit, self._plan.writes)

    def began(self) -> None:
        """The engine has read the prompt: publish this request's entries."""
        for write in self._plan.writes:
            if write.boundary.end > self._num_hit:
                self._entries.write(write.boundary.digest, write.ttl_s, self._at)


def _no_sequence() -> NoReturn:
    raise AssertionError("the sequences of an engine are its own")
