"""Bytes in each tier of the prefix store, counted in a thread and cached, since counting a folder is slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from kvfold.store.store import PrefixStore
from kvfold.store.tiers.base import Tier

MAX_AGE_S = 5.0


class TierUsage:
    """Bytes by tier, fastest first; None for tiers that do not count, such as Redis."""

    def __init__(self, store: PrefixStore | None, max_age_s: float = MAX_AGE_S) -> None:
        self._store, self._max_age_s = store, max_age_s
        self._counted_at: float | None = None
        self._found: dict[str, int | None] = {}

    async def read(self) -> dict[str, int | None]:
        """At most `max_age_s` old."""
        if self._counted_at is None or time.monotonic() - self._counted_at > self._max_age_s:
            self._counted_at = time.monotonic()
            self._found = await asyncio.to_thread(self._count)
        return self._found

    def _count(self) -> dict[str, int | None]:
        found = dict(self._found)
        for tier in self._tiers():
            with suppress(OSError):  # a file was deleted meanwhile: keep the previous count
                found[tier.name] = getattr(tier, "num_bytes", None)
        return found

    def _tiers(self) -> Iterator[Tier[Any, Any]]:
        if self._store is not None:
            yield from () if self._store.device is None else (self._store.device,)
            yield from self._store.tiered.tiers
