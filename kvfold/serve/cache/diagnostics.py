"""Why a prompt could not be read from the cache as far as the one before it was: what changed between the two.

Of each answered request its fingerprint is kept for a while: digests of tools, of system text, and of every place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from kvfold.serve.api.request import Ask, Block
from kvfold.serve.cache.cache_breakpoints import Place

MAX_KEPT = 1 << 14


@dataclass(frozen=True)
class Fingerprint:
    """`num_cached`: tokens that the request left behind in the cache."""

    tenant: str
    model: str
    tools: int
    system: int
    digests: Sequence[bytes]
    num_cached: int


def fingerprint(ask: Ask, tenant: str, places: Sequence[Place], num_cached: int) -> Fingerprint:
    digests = [place.digest for place in places if place.section == "messages"]
    return Fingerprint(tenant, ask.model, _hash(ask, "tools"), _hash(ask, "system"), digests, num_cached)


def _hash(ask: Ask, section: str) -> int:
    return hash(tuple(_content(block) for block in ask.blocks if block.section == section))


def _content(block: Block) -> str:
    return f"{block.kind} {block.text} {dict(block.data)}"


class Diagnoses:
    """Fingerprints by message id, the latest ones."""

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._max = max_kept
        self._lock = Lock()
        self._kept: OrderedDict[str, Fingerprint] = OrderedDict()

    def keep(self, message_id: str, mine: Fingerprint) -> None:
        with self._lock:
            self._kept[message_id] = mine
            if len(self._kept) > self._max:
                self._kept.popitem(last=False)

    def reason(self, previous_id: str | None, mine: Fingerprint, num_hit: int) -> dict[str, Any] | None:
        """Anthropic's `cache_miss_reason`; None if nothing diverged, or nothing is to be compared."""
        if previous_id is None:
            return None
        with self._lock:
            before = self._kept.get(previous_id)
        if before is None or before.tenant != mine.tenant:
            return {"type": "previous_message_not_found"}
        num_missed = max(before.num_cached - num_hit, 0)
        changed = _changed(before, mine)
        if changed is not None:
            return {"type": changed, "cache_missed_input_tokens": num_missed}
        return {"type": "unavailable"} if num_missed else None


def _changed(before: Fingerprint, mine: Fingerprint) -> str | None:
    if before.model != mine.model:
        return "model_changed"
    if before.tools != mine.tools:
        return "tools_changed"
    if before.system != mine.system:
        return "system_changed"
    is_continued = list(mine.digests[: len(before.digests)]) == list(before.digests)
    return None if is_continued else "messages_changed"
