"""What requests would leave in the prompt cache and find there, told without a model.

The server's own rules are applied to a request alone, and to one that comes while all that another wrote is alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvfold.serve.api.anthropic import read_messages
from kvfold.serve.api.request import Ask, Block, Section
from kvfold.serve.cache.cache_breakpoints import LOOKBACK, Place, Plan, anthropic_plan, places_of, points_of
from kvfold.serve.cache.diagnostics import Diagnoses, fingerprint
from kvfold.serve.cache.usage import Bill, Price, bill, read_factor_of
from kvfold.serve.prompt import Prompter
from kvfold.serve.settings import Settings

Status = Literal["written", "below_minimum", "looked_at", "not_looked_at"]
_MOST_REQUESTS = 1000  # a prefix that has not paid by then never does


@dataclass(frozen=True)
class Step:
    """A place of a prompt: what ends there, and what the cache does with it."""

    number: int
    section: Section
    begins: str  # how the text of its last block begins
    end: int  # tokens up to here
    ttl_s: float | None  # of the marker that stands here
    status: Status
    is_point: bool  # whether a policy that compresses does so here


@dataclass(frozen=True)
class Explained:
    """A request alone. `min_tokens`: the least length of a cached prefix. `cold` is billed where nothing is cached yet,
    `warm` when it is sent again."""

    ask: Ask
    plan: Plan
    num_tokens: int
    min_tokens: int
    has_places: bool
    steps: Sequence[Step]

    @property
    def cold(self) -> Bill:
        return bill(self.num_tokens, 0, self.plan.marks)

    @property
    def warm(self) -> Bill:
        return bill(self.num_tokens, max((mark.place.end for mark in self.plan.marks), default=0), self.plan.marks)

    def factor(self, num_requests: int) -> float:
        """The price of the prompt sent so many times, as a multiple of its price without caching."""
        cold, warm = self.cost(self.cold), self.cost(self.warm)
        return (cold + (num_requests - 1) * warm) / (num_requests * self.num_tokens)

    def cost(self, paid: Bill) -> float:
        """In tokens of plain input."""
        return Price(1e6, 0.0, read_factor_of(self.ask.model)).cost(paid, 0)

    @property
    def break_even(self) -> int | None:
        """The number of requests from which on caching is cheaper; None if it never is."""
        return next((count for count in range(1, _MOST_REQUESTS) if self.factor(count) < 1), None)


@dataclass(frozen=True)
class Compared:
    """A request after another. `reason` is what the server's `diagnostics` would say, `why` a sentence more."""

    paid: Bill
    reason: dict[str, Any] | None
    why: str


def explain(data: object, prompter: Prompter, settings: Settings) -> Explained:
    """`data`: the body of a request to /v1/messages; ApiError if a server would refuse it."""
    ask = read_messages(data, settings).ask
    prompt = prompter.prompt(ask)
    min_tokens = settings.min_tokens(ask.model)
    plan = anthropic_plan(places_of(ask, prompt, ask.model), min_tokens)
    points = points_of(plan.places, settings.point_tokens)
    block_at = dict(zip(prompt.ends or (), ask.blocks, strict=False))
    steps = [
        Step(
            number=i,
            section=place.section,
            begins=_begins(block_at[place.end]),
            end=place.end,
            ttl_s=place.ttl_s,
            status=_status(place, plan),
            is_point=place.end in points,
        )
        for i, place in enumerate(plan.places)
    ]
    return Explained(ask, plan, len(prompt.tokens), min_tokens, prompt.ends is not None, steps)


def _begins(block: Block) -> str:
    return " ".join((block.text or str(block.data.get("name", ""))).split())[:40]


def _status(place: Place, plan: Plan) -> Status:
    if any(mark.place is place for mark in plan.marks):
        return "written"
    if place.ttl_s is not None:
        return "below_minimum"
    return "looked_at" if place in plan.candidates else "not_looked_at"


def compare(first: Explained, second: Explained) -> Compared:
    """What the second request reads of what the first one wrote."""
    written = {mark.place.digest for mark in first.plan.marks}
    num_hit = next((place.end for place in second.plan.candidates if place.digest in written), 0)
    paid, left = bill(second.num_tokens, num_hit, second.plan.marks), first.cold.num_written
    diagnoses = Diagnoses()
    diagnoses.keep("first", fingerprint(first.ask, "", first.plan.places, left))
    mine = fingerprint(second.ask, "", second.plan.places, num_hit + paid.num_written)
    return Compared(paid, diagnoses.reason("first", mine, num_hit), _why(first, second, num_hit, left))


def _why(first: Explained, second: Explained, num_hit: int, num_left: int) -> str:
    """The first thing that stands in the way of reading all that the first request left."""
    for name, one in (("first", first), ("second", second)):
        if not one.plan.marks:
            return f"the {name} request caches nothing: {nothing_cached(one)}"
    if num_hit >= num_left:
        return f"all {num_left} tokens that the first request wrote are read"
    if first.ask.model != second.ask.model:
        return f"the model is {second.ask.model}, it was {first.ask.model}; models do not share entries"
    differs = _first_difference(first, second)
    if differs is not None and differs.end <= num_left:
        return f'place {differs.number} ({differs.section}) differs from the first request: "{differs.begins}"'
    looked = min(second.plan.places.index(place) for place in second.plan.candidates)
    return f"the entry lies before place {looked}: a marker looks back over {LOOKBACK} places, its own included"


def _first_difference(first: Explained, second: Explained) -> Step | None:
    """The first place of the second request that the first one does not have."""
    known = {place.digest for place in first.plan.places}
    pairs = zip(second.plan.places, second.steps, strict=True)
    return next((step for place, step in pairs if place.digest not in known), None)


def nothing_cached(one: Explained) -> str:
    """Why a request without entries has none."""
    if not one.has_places:
        return "the model's chat template rewrites texts, so that it does not tell where blocks end"
    marked = [step.end for step in one.steps if step.ttl_s is not None]
    if not marked:
        return "no block carries cache_control"
    return f"its last marker stands at {marked[-1]} tokens, and a cached prefix has at least {one.min_tokens}"
