"""Prompt-cache breakpoints by Anthropic's and OpenAI's rules: which prefixes a request writes and which it looks up.

A *boundary* is a position where a cache entry can end: the end of a content block, or of a run of tool calls or tool
results. A boundary with a cache marker is a *breakpoint*. Its digest covers every token up to it and, from the first
message on, `tool_choice`; markers are not part of it, so equal digests mean equal prefixes.

A lossy policy compresses at some of the boundaries, the *compression points*, which depend on the prompt alone, not on
markers or cache state. The points of a prompt are the first points of every prompt that continues it.

    boundaries   0 1 2 … 14 [15] 16 … 33 34 [35]        a marker at 35 looks up 35 … 16, the next one 15 … 0
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvfold.serve.api.request import Block, ChatRequest, Section
from kvfold.serve.prompt import Prompt

LOOKBACK = 20  # boundaries, the marker's own included
POINT_TOKENS = 512  # minimum distance of two compression points; the shortest prefix cached by default has as many
MOST_EXPLICIT = (2, 50)  # OpenAI looks up the first and the last explicit breakpoints


@dataclass(frozen=True)
class Boundary:
    """`end`: tokens up to here."""

    end: int
    digest: bytes
    section: Section
    ends_turn: bool = False  # an implicit breakpoint under OpenAI's rules
    ttl_s: float | None = None  # of its cache marker


@dataclass(frozen=True)
class CacheWrite:
    """A cache entry that a request writes."""

    boundary: Boundary
    ttl_s: float


@dataclass(frozen=True)
class CachePlan:
    """`candidates`: boundaries to look up, longest first; `writes`: in order; `boundaries`: all of the prompt."""

    boundaries: Sequence[Boundary] = ()
    candidates: Sequence[Boundary] = ()
    writes: Sequence[CacheWrite] = ()

    def before(self, num_tokens: int) -> CachePlan:
        """Of entries that end before so many tokens."""
        candidates = [boundary for boundary in self.candidates if boundary.end < num_tokens]
        return CachePlan(self.boundaries, candidates, [one for one in self.writes if one.boundary.end < num_tokens])


def boundaries_of(request: ChatRequest, prompt: Prompt, scope: str) -> list[Boundary]:
    """Boundaries of a prompt; `scope` is part of every digest. Empty where the template does not keep blocks apart."""
    if prompt.ends is None:
        return []
    digest, begin, found = hashlib.blake2b(scope.encode(), digest_size=32), 0, list[Boundary]()
    for index, (block, end) in enumerate(zip(request.blocks, prompt.ends, strict=True)):
        if block.section == "messages" and (index == 0 or request.blocks[index - 1].section != "messages"):
            digest.update(f"tool_choice={request.tool_choice}".encode())
        digest.update(array("I", prompt.tokens[begin:end]).tobytes())
        begin = end
        boundary = Boundary(end, digest.digest(), block.section, _ends_turn(request.blocks, index), block.ttl_s)
        if index and request.blocks[index - 1].kind == block.kind and block.kind in ("tool_use", "tool_result"):
            before = found.pop()  # a marker anywhere in a run counts for its end
            boundary = replace(boundary, ttl_s=before.ttl_s) if boundary.ttl_s is None else boundary
        found.append(boundary)
    return found


def compression_points(boundaries: Sequence[Boundary], least: int) -> list[int]:
    """Lengths at which a prompt is compressed: each is the first boundary `least` tokens or more after the last one."""
    found: list[int] = []
    for boundary in boundaries:
        if boundary.end - (found[-1] if found else 0) >= least:
            found.append(boundary.end)
    return found


def _ends_turn(blocks: Sequence[Block], index: int) -> bool:
    """The end of a user message, of a run of tool results, or of the leading system messages."""
    block, after = blocks[index], blocks[index + 1] if index + 1 < len(blocks) else None
    if block.role not in ("user", "tool", "system") or block.kind in ("tool", "memory"):
        return False
    return after is None or after.kind == "memory" or (after.message, after.role) != (block.message, block.role)


def anthropic_plan(boundaries: Sequence[Boundary], min_tokens: int) -> CachePlan:
    """Writes at markers only; markers below the minimum cacheable length have no effect."""
    at = [i for i, boundary in enumerate(boundaries) if boundary.ttl_s is not None and boundary.end >= min_tokens]
    writes = [CacheWrite(boundaries[i], boundaries[i].ttl_s or 0.0) for i in at]
    return CachePlan(boundaries, list(_windows(boundaries, at)), writes)


def _windows(boundaries: Sequence[Boundary], at: Sequence[int]) -> Iterator[Boundary]:
    """LOOKBACK boundaries back from the last marker, then from the one before it, …; none twice."""
    seen = len(boundaries)
    for i in reversed(at):
        first = max(i - LOOKBACK + 1, 0)
        yield from (boundaries[j] for j in range(min(i, seen - 1), first - 1, -1))
        seen = min(seen, first)


def openai_plan(boundaries: Sequence[Boundary], min_tokens: int, ttl_s: float, *, is_implicit: bool) -> CachePlan:
    """The last end of a turn is an implicit breakpoint; at most four entries are written, the last explicit ones."""
    long = [boundary for boundary in boundaries if boundary.end >= min_tokens]
    explicit = [boundary for boundary in long if boundary.ttl_s is not None]
    turns = [boundary for boundary in long if boundary.ends_turn] if is_implicit else []
    first, latest = MOST_EXPLICIT
    looked = {boundary.end: boundary for boundary in (*explicit[:first], *explicit[-latest:], *turns[-LOOKBACK - 1 :])}
    written = {boundary.end: boundary for boundary in (*explicit[-(3 if turns else 4) :], *turns[-1:])}
    writes = [CacheWrite(written[end], ttl_s) for end in sorted(written)]
    return CachePlan(boundaries, [looked[end] for end in sorted(looked, reverse=True)], writes)
