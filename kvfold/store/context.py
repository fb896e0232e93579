"""What lookups and saves of one store share: its tiers, events, key index, clock and secret."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvfold.errors import InputError
from kvfold.store.entry.encodings import check_encoding
from kvfold.store.entry.format import MAX_ENTRY_BYTES, check_secret
from kvfold.store.events import Events, KeyIndex
from kvfold.store.key import CHUNK_LEN, Binding, Key
from kvfold.store.tiers.base import ByteTier, Clock
from kvfold.store.tiers.device import DeviceTier
from kvfold.store.tiers.tiered_cache import BackgroundQueue, BadCopies, Job, Quarantine, TieredCache

if TYPE_CHECKING:
    from kvfold.store.kv_events.blocks import BlockIndex  # it needs an extra

QUEUE_BYTES = 1 << 30
_MAX_FETCHES = 64  # queued prefetches, one a prompt


class StoreContext:
    """Byte tiers, fastest first, behind an optional device tier. `offload`: False leaves KV to the device tier; byte
    tiers then hold cache markers only."""

    def __init__(
        self,
        tiers: Sequence[ByteTier],
        *,
        device: DeviceTier | None = None,
        offload: bool = True,
        chunk_len: int = CHUNK_LEN,
        quarantine: Quarantine | None = None,
        queue_bytes: int = QUEUE_BYTES,
        max_entry_bytes: int = MAX_ENTRY_BYTES,
        secret: bytes = b"",
        form: str = "exact",
        clock: Clock = time.time,
    ) -> None:
        if chunk_len < 1:
            raise InputError(f"chunk_len is {chunk_len}; it must be at least 1")
        check_secret(secret)
        check_encoding(form)
        self.events = Events()
        self.form = form
        self.device = device
        self.offload = offload
        self.chunk_len = chunk_len
        self.max_entry_bytes = max_entry_bytes
        self.secret = secret
        self.clock = clock
        self._write_queue = BackgroundQueue(queue_bytes)
        self._fetch_queue = BackgroundQueue(_MAX_FETCHES, yields=False)
        self.tiered = TieredCache(list(tiers), self.events, self._write_queue, quarantine, BadCopies(clock))
        self.key_index = KeyIndex()
        self.events.subscribe(self.key_index.on_event)
        self._blocks: BlockIndex | None = None
        self._is_scanned = False
        for tier in tiers:
            tier.events = self.events
        if device is not None:
            device.events = self.events

    def snapshots(self, scope: str) -> list[int]:
        """Lengths at which local tiers may hold snapshots; their keys are scanned once."""
        if not self._is_scanned:
            self._is_scanned = True
            for tier in self.tiered.tiers:
                self.key_index.add(tier.name, () if tier.is_shared else tier.keys())
        return self.key_index.lens(scope)

    # Blocks, where routers are told of them

    def name_blocks(self, binding: Binding, keys: Sequence[Key], tokens: Sequence[int]) -> None:
        """These are keys of prefixes of `tokens`."""
        if self._blocks is not None:
            self._blocks.name(binding, keys, tokens)

    def found_block(self, tier: str, key: Key) -> None:
        """A tier has had it, maybe from before this process."""
        if self._blocks is not None:
            self._blocks.found(tier, key)

    def discard(self, keys: Sequence[Key]) -> None:
        """No byte tier has these keys, or they are unreachable without their parents."""
        self.key_index.discard(keys)
        if self._blocks is not None:
            self._blocks.lost(keys, [tier.name for tier in self.tiered.tiers])

    def fetch_async(self, job: Job) -> None:
        """In a thread of its own, so that prefetches do not queue behind writes."""
        self._fetch_queue.submit(1, job)
