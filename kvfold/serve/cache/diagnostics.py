"""Anthropic's `cache_miss_reason`: what changed since the previous request, so that its cached prefix was missed.

Compares fingerprints of recent requests: hashes of tools and system text, digests of every boundary of the messages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

from kvfold.serve.api.request import ChatRequest
from kvfold.serve.cache.breakpoints import Boundary

MAX_KEPT = 1 << 14


@dataclass(frozen=True)
class Fingerprint:
    """`num_cached`: prompt tokens read from or written to the cache."""

    tenant: str
    model: str
    tools: int
    system: int
    digests: Sequence[bytes]
    num_cached: int


def fingerprint(request: ChatRequest, tenant: str, boundaries: Sequence[Boundary], num_cached: int) -> Fingerprint:
    digests = [boundary.digest for boundary in boundaries if boundary.section == "messages"]
    return Fingerprint(tenant, request.model, _hash(request, "tools"), _hash(request, "system"), digests, num_cached)


def _hash(request: ChatRequest, section: str) -> int:
    blocks = (block for block in request.blocks if block.section == section)
    return hash(tuple(f"{block.kind} {block.text} {dict(block.data)}" for block in blocks))


class CacheDiagnostics:
    """The latest `max_kept` fingerprints by message id."""

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
        """`cache_miss_reason`; None if nothing changed, or no previous message is named."""
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
