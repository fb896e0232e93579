"""Offline explanation of prompt caching: what a request would write and read, its price, and why it would miss.

Applies the server's rules to a request alone, and to a second request while the first one's entries are live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvfold.serve.api.anthropic import read_messages
from kvfold.serve.api.request import Block, ChatRequest, Section
from kvfold.serve.cache.breakpoints import (
    LOOKBACK,
    Boundary,
    CachePlan,
    anthropic_plan,
    boundaries_of,
    compression_points,
)
from kvfold.serve.cache.diagnostics import CacheDiagnostics, fingerprint
from kvfold.serve.cache.usage import Price, Usage, read_factor_of, usage_of
from kvfold.serve.prompt import PromptRenderer
from kvfold.serve.settings import Settings

Status = Literal["written", "below_minimum", "looked_at", "not_looked_at"]
_MOST_REQUESTS = 1000  # a prefix that has not paid off by then never does


@dataclass(frozen=True)
class ExplainedBoundary:
    """A boundary of a prompt and what the cache does there."""

    number: int
    section: Section
    begins: str  # first characters of its last block
    end: int  # tokens up to here
    ttl_s: float | None  # of its cache marker
    status: Status
    is_point: bool  # a compression point of lossy policies


@dataclass(frozen=True)
class CacheExplanation:
    """A request alone. `min_tokens`: minimum cacheable length. `cold`: usage with an empty cache, `warm`: when it is
    sent again."""

    request: ChatRequest
    plan: CachePlan
    tokens: Sequence[int]
    min_tokens: int
    has_boundaries: bool
    steps: Sequence[ExplainedBoundary]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def cold(self) -> Usage:
        return usage_of(self.num_tokens, 0, self.plan.writes)

    @property
    def warm(self) -> Usage:
        num_hit = max((write.boundary.end for write in self.plan.writes), default=0)
        return usage_of(self.num_tokens, num_hit, self.plan.writes)

    def factor(self, num_requests: int) -> float:
        """Price of sending the prompt `num_requests` times, as a multiple of the price without caching."""
        cold, warm = self.cost(self.cold), self.cost(self.warm)
        return (cold + (num_requests - 1) * warm) / (num_requests * self.num_tokens)

    def cost(self, usage: Usage) -> float:
        """In uncached input tokens."""
        return Price(1e6, 0.0, read_factor_of(self.request.model)).cost(usage, 0)

    @property
    def break_even(self) -> int | None:
        """Number of requests from which on caching is cheaper; None if it never is."""
        return next((count for count in range(1, _MOST_REQUESTS) if self.factor(count) < 1), None)


@dataclass(frozen=True)
class CacheComparison:
    """A request after another. `paid`: its usage; `reason`: the server's `cache_miss_reason`; `why`: in a sentence.

    `is_miss`: the first request wrote an entry, the second has one to look up, and not all of it was read.
    """

    paid: Usage
    reason: dict[str, Any] | None
    why: str
    is_miss: bool


def explain(data: object, renderer: PromptRenderer, settings: Settings) -> CacheExplanation:
    """`data`: the body of a /v1/messages request; ApiError if a server would refuse it."""
    request = read_messages(data, settings).request
    prompt = renderer.prompt(request)
    min_tokens = settings.min_tokens(request.model)
    plan = anthropic_plan(boundaries_of(request, prompt, request.model), min_tokens)
    points = compression_points(plan.boundaries, settings.point_tokens)
    block_at = dict(zip(prompt.ends or (), request.blocks, strict=False))
    steps = [
        ExplainedBoundary(
            number=i,
            section=boundary.section,
            begins=_begins(block_at[boundary.end]),
            end=boundary.end,
            ttl_s=boundary.ttl_s,
            status=_status(boundary, plan),
            is_point=boundary.end in points,
        )
        for i, boundary in enumerate(plan.boundaries)
    ]
    return CacheExplanation(request, plan, prompt.tokens, min_tokens, prompt.ends is not None, steps)


def _begins(block: Block) -> str:
    return " ".join((block.text or str(block.data.get("name", ""))).split())[:40]


def _status(boundary: Boundary, plan: CachePlan) -> Status:
    if any(write.boundary is boundary for write in plan.writes):
        return "written"
    if boundary.ttl_s is not None:
        return "below_minimum"
    return "looked_at" if boundary in plan.candidates else "not_looked_at"


def compare(first: CacheExplanation, second: CacheExplanation) -> CacheComparison:
    """What the second request reads of the first one's entries."""
    written = {write.boundary.digest for write in first.plan.writes}
    num_hit = next((boundary.end for boundary in second.plan.candidates if boundary.digest in written), 0)
    paid, left = usage_of(second.num_tokens, num_hit, second.plan.writes), first.cold.num_written
    diagnostics = CacheDiagnostics()
    diagnostics.keep("first", fingerprint(first.request, "", first.plan.boundaries, left))
    mine = fingerprint(second.request, "", second.plan.boundaries, num_hit + paid.num_written)
    is_miss = bool(first.plan.writes and second.plan.writes) and num_hit < left
    why = _why(first, second, num_hit, left)
    return CacheComparison(paid, diagnostics.reason("first", mine, num_hit), why, is_miss)


def _why(first: CacheExplanation, second: CacheExplanation, num_hit: int, num_left: int) -> str:
    """The first reason for not reading all that the first request wrote."""
    for name, one in (("first", first), ("second", second)):
        if not one.plan.writes:
            return f"the {name} request caches nothing: {nothing_cached(one)}"
    if num_hit >= num_left:
        return f"all {num_left} tokens that the first request wrote are read"
    if first.request.model != second.request.model:
        return f"the model is {second.request.model}, it was {first.request.model}; models do not share entries"
    known = {boundary.digest for boundary in first.plan.boundaries}
    pairs = zip(second.plan.boundaries, second.steps, strict=True)
    differs = next((step for boundary, step in pairs if boundary.digest not in known), None)
    if differs is not None and _begin(second, differs) < num_left:
        return _difference(first, second, differs)
    last = second.plan.candidates[0].end
    if num_left > last:
        return f"the entry has {num_left} tokens, and the last marker of the second request is at {last}: mark more"
    first_looked = min(second.plan.boundaries.index(boundary) for boundary in second.plan.candidates)
    return f"the entry ends before boundary {first_looked}: the lookback of a marker is {LOOKBACK} boundaries"


def _begin(one: CacheExplanation, step: ExplainedBoundary) -> int:
    """Tokens before the block that ends at a boundary."""
    return one.steps[step.number - 1].end if step.number else 0


def _difference(first: CacheExplanation, second: CacheExplanation, step: ExplainedBoundary) -> str:
    """Where the second request leaves the text of the first one."""
    place = f"boundary {step.number} ({step.section})"
    pairs = enumerate(zip(first.tokens, second.tokens, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(first.num_tokens, second.num_tokens))
    if at < step.end:
        return f'{place} differs from the first request, from token {at + 1} of the prompt on: "{step.begins}"'
    asked, before = second.request.tool_choice, first.request.tool_choice
    if asked != before:
        return f"tool_choice is {asked}, it was {before}; messages are cached for each by itself"
    return f'{place} ends where no block of the first request does: "{step.begins}"'


def nothing_cached(one: CacheExplanation) -> str:
    """Why a request writes no entry."""
    if not one.has_boundaries:
        return "the model's chat template rewrites texts, so block boundaries are unknown"
    marked = [step.end for step in one.steps if step.ttl_s is not None]
    if not marked:
        return "no block carries cache_control"
    return f"its last marker is at {marked[-1]} tokens; the minimum cacheable length is {one.min_tokens}"
