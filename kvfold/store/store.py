"""A store of prefixes: what one request computed, for the next one that begins the same.

    store = PrefixStore([HostTier(8 << 30), DiskTier("prefixes", 100 << 30)], device=DeviceTier(4 << 30))
    prefixes = store.prefixes(model, "full", prefill_len=runner.chunk_len)
    hit = prefixes.lookup(tokens)
    runner.prefill([hit.sequence], [tokens[hit.matched_tokens :]])
    prefixes.save(hit.sequence, tokens)

What goes wrong with what is stored is a miss, with an event that says why; it never reaches the caller.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.pages.sequence import PageConfig
from kvfold.policy.policy import Policy
from kvfold.store.binding import bind
from kvfold.store.cascade import Cascade
from kvfold.store.device import DeviceTier
from kvfold.store.entry import MAX_ENTRY_BYTES
from kvfold.store.events import Events, Subscriber
from kvfold.store.form import check_form
from kvfold.store.key import CHUNK_LEN
from kvfold.store.known import Known
from kvfold.store.prefixes import Prefixes
from kvfold.store.quarantine import Quarantine
from kvfold.store.secret import check_secret, signer_of
from kvfold.store.tier import ByteTier, Clock
from kvfold.store.writer import Job, Writer

QUEUE_BYTES = 1 << 30
_MAX_FETCHES = 64  # prompts whose prefixes are on their way to the host, or wait for it


class PrefixStore:
    """Byte tiers, fastest first, behind an optional device tier; one store per process, for any number of models.

    `secret` keys every digest: whoever can write to a shared tier without knowing it can spoil entries, not forge them.
    `form` is how the byte tiers hold prefixes (`kvfold.store.form`); stores of different forms share nothing.
    """

    def __init__(
        self,
        tiers: Sequence[ByteTier],
        *,
        device: DeviceTier | None = None,
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
        check_form(form)
        self.events = Events()
        self.form = form
        self.device = device
        self.chunk_len = chunk_len
        self.max_entry_bytes = max_entry_bytes
        self.secret = secret
        self.clock = clock
        self._writer = Writer(queue_bytes)
        self._fetcher = Writer(_MAX_FETCHES)
        self.cascade = Cascade(tiers, self.events, self._writer, quarantine, clock)
        self.known = Known()
        self.subscribe(self.known.note)
        self._is_scanned = False
        for tier in tiers:
            tier.events = self.events
        if device is not None:
            device.events = self.events

    def prefixes(
        self,
        model: Model,
        policy: str | Policy = "full",
        *,
        prefill_len: int,
        config: PageConfig | None = None,
        tenant: str = "",
    ) -> Prefixes:
        """Those of one model under one policy, for one tenant; `prefill_len` is the runner's `chunk_len`.

        PolicyError or ModelError if they cannot be reused at all, InputError if not in the store's form.
        """
        policy, config = Policy.parse(policy), config or PageConfig()
        binding = bind(
            model,
            policy,
            config,
            prefill_len=prefill_len,
            chunk_len=self.chunk_len,
            tenant=tenant,
            form=self.form,
            signer=signer_of(self.secret),
        )
        return Prefixes(self, model, policy, config, binding)

    def snapshots(self, scope: str) -> list[int]:
        """Lengths at which local tiers may hold snapshots; what they held before this process is found out once."""
        if not self._is_scanned:
            self._is_scanned = True
            for tier in self.cascade.tiers:
                self.known.found(tier.name, () if tier.is_shared else tier.keys())
        return self.known.lens(scope)

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call it with every event; returns what ends that."""
        return self.events.subscribe(subscriber)

    def counters(self) -> dict[str, int]:
        return self.events.counters()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until what was saved has been written, and what was asked for fetched; False if either took longer."""
        return self._writer.flush(timeout_s) and self._fetcher.flush(timeout_s)

    def fetch_later(self, job: Job) -> None:
        """In a thread of its own: what is to be read soon does not stand in line behind what is written."""
        self._fetcher.submit(1, job)

    def close(self) -> None:
        """Write what waits, and let go of memory, folders and connections."""
        self._fetcher.close()
        self._writer.close()
        for tier in self.cascade.tiers:
            tier.close()
        if self.device is not None:
            self.device.close()

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
