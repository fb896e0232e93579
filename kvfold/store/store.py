"""A store of prefixes: what one request computed, for the next one that begins the same.

    store = PrefixStore([HostTier(8 << 30), DiskTier("prefixes", 100 << 30)], device=DeviceTier(4 << 30))
    prefixes = store.prefixes(model, "full", prefill_len=runner.chunk_len)
    hit = prefixes.lookup(tokens)
    runner.prefill([hit.sequence], [tokens[hit.matched_tokens :]])
    prefixes.save(hit.sequence, tokens)

What goes wrong with what is stored is a miss, with an event that says why; it never reaches the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from kvfold.models.loader import Model
from kvfold.pages.page_config import PageConfig
from kvfold.policy.policy import Policy
from kvfold.store.binding import bind
from kvfold.store.context import StoreContext
from kvfold.store.entry.signing import signer_of
from kvfold.store.events import Subscriber
from kvfold.store.prefixes import Prefixes

QUEUE_BYTES = 1 << 30
_MAX_FETCHES = 64  # prompts whose prefixes are on their way to the host, or wait for it


class PrefixStore(StoreContext):
    """Byte tiers, fastest first, behind an optional device tier; one store per process, for any number of models.

    `secret` keys every digest: whoever can write to a shared tier without knowing it can spoil entries, not forge them.
    `form` is how the byte tiers hold prefixes (`kvfold.store.entry.encodings`); stores of other forms share nothing.
    """

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

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call it with every event; returns what ends that."""
        return self.events.subscribe(subscriber)

    def counters(self) -> dict[str, int]:
        return self.events.counters()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until what was saved has been written, and what was asked for fetched; False if either took longer."""
        return self._writer.flush(timeout_s) and self._fetcher.flush(timeout_s)

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
