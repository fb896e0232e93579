"""Where a prompt may be cached and where to look for what is: Anthropic's rules, and OpenAI's.

A *place* is a position that an entry can lie at: the end of a block, where a run of calls of tools, or of their
results, is one place. Its digest covers every token up to it, and from the first message on how tools are chosen; so
equal digests mean equal prefixes, and markers are no part of them.

A policy that compresses does so at some of the places, the *points*, which follow from the prompt alone: neither its
markers nor what was cached has a say. The points of a prompt are the first points of every prompt that continues it.

    places   0 1 2 … 14 [15] 16 … 33 34 [35]        a marker at 35 looks at 35 … 16, the next one at 15 … 0
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvfold.serve.api.request import Ask, Block, Section
from kvfold.serve.prompt import Prompt

LOOKBACK = 20  # places, the marker's own included
POINT_TOKENS = 512  # least distance of two points; the shortest prefix that is cached by default has as many
MOST_EXPLICIT = (2, 50)  # OpenAI looks at the first and the latest markers


@dataclass(frozen=True)
class Place:
    """`end`: tokens up to here."""

    end: int
    digest: bytes
    section: Section
    ends_turn: bool = False  # whether OpenAI would cache here unasked
    ttl_s: float | None = None  # of the marker that stands here


@dataclass(frozen=True)
class Mark:
    """An entry that a request writes."""

    place: Place
    ttl_s: float


@dataclass(frozen=True)
class Plan:
    """`candidates`: where to look, the best first; `marks`: what to write, in order. `places` are all."""

    places: Sequence[Place] = ()
    candidates: Sequence[Place] = ()
    marks: Sequence[Mark] = ()


def places_of(ask: Ask, prompt: Prompt, scope: str) -> list[Place]:
    """Of one request; `scope` names tenant, model and policy. None where the template keeps no blocks apart."""
    if prompt.ends is None:
        return []
    digest, begin, found = hashlib.blake2b(scope.encode(), digest_size=32), 0, list[Place]()
    for index, (block, end) in enumerate(zip(ask.blocks, prompt.ends, strict=True)):
        if block.section == "messages" and (index == 0 or ask.blocks[index - 1].section != "messages"):
            digest.update(f"tool_choice={ask.tool_choice}".encode())
        digest.update(array("I", prompt.tokens[begin:end]).tobytes())
        begin = end
        place = Place(end, digest.digest(), block.section, _ends_turn(ask.blocks, index), block.ttl_s)
        if index and _is_one_run(ask.blocks[index - 1], block):
            found[-1] = _joined(found[-1], place)
        else:
            found.append(place)
    return found


def points_of(places: Sequence[Place], least: int) -> list[int]:
    """Lengths at which a prompt is compressed: the first place that is `least` tokens or more from the last point."""
    found: list[int] = []
    for place in places:
        if place.end - (found[-1] if found else 0) >= least:
            found.append(place.end)
    return found


def _is_one_run(before: Block, block: Block) -> bool:
    return block.kind == before.kind and block.kind in ("tool_use", "tool_result")


def _joined(before: Place, place: Place) -> Place:
    """A marker anywhere in a run stands at its end."""
    ttl_s = before.ttl_s if place.ttl_s is None else place.ttl_s
    return Place(place.end, place.digest, place.section, place.ends_turn, ttl_s)


def _ends_turn(blocks: Sequence[Block], index: int) -> bool:
    """The end of a message of the user, of a run of results, or of the leading system messages."""
    block, after = blocks[index], blocks[index + 1] if index + 1 < len(blocks) else None
    if block.role not in ("user", "tool", "system") or block.kind == "tool":
        return False
    return after is None or (after.message, after.role) != (block.message, block.role)


def anthropic_plan(places: Sequence[Place], min_tokens: int) -> Plan:
    """Entries at markers only; markers below the least length do nothing."""
    at = [i for i, place in enumerate(places) if place.ttl_s is not None and place.end >= min_tokens]
    marks = [Mark(places[i], places[i].ttl_s or 0.0) for i in at]
    return Plan(places, list(_windows(places, at)), marks)


def _windows(places: Sequence[Place], at: Sequence[int]) -> Iterator[Place]:
    """Back from the last marker, then from the one before it, and so on; no place twice."""
    seen = len(places)
    for i in reversed(at):
        first = max(i - LOOKBACK + 1, 0)
        yield from (places[j] for j in range(min(i, seen - 1), first - 1, -1))
        seen = min(seen, first)


def openai_plan(places: Sequence[Place], min_tokens: int, ttl_s: float, *, is_implicit: bool) -> Plan:
    """The latest end of a turn is marked unasked; up to four entries are written, explicit ones the latest."""
    long = [place for place in places if place.end >= min_tokens]
    explicit = [place for place in long if place.ttl_s is not None]
    turns = [place for place in long if place.ends_turn] if is_implicit else []
    first, latest = MOST_EXPLICIT
    looked = {place.end: place for place in (*explicit[:first], *explicit[-latest:], *turns[-LOOKBACK - 1 :])}
    written = {place.end: place for place in (*explicit[-(3 if turns else 4) :], *turns[-1:])}
    marks = [Mark(written[end], ttl_s) for end in sorted(written)]
    return Plan(places, [looked[end] for end in sorted(looked, reverse=True)], marks)
