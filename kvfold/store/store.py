"""The prefix cache (automatic prefix caching across requests): tiers of KV prefixes, looked up by prompt tokens.

    store = PrefixStore([HostTier(8 << 30), DiskTier("prefixes", 100 << 30)], device=DeviceTier(4 << 30))
    prefixes = store.prefixes(model, "full", prefill_len=runner.chunk_len)
    hit = prefixes.lookup(tokens)
    runner.prefill([hit.sequence], [tokens[hit.matched_tokens :]])
    prefixes.save(hit.sequence, tokens)

Invalid entries and tier failures are misses with an event that gives the reason; they never raise to the caller.
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


class PrefixStore(StoreContext):
    """Byte tiers, fastest first, behind an optional device tier; one store per process, for any number of models.

    `secret` keys every digest: without it a writer to a shared tier can corrupt entries, not forge them. `form` is the
    encoding of entries (`kvfold.store.entry.encodings`); stores with different encodings share no entries.
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
        """Prefixes of one model, policy and tenant; `prefill_len` is the runner's `chunk_len`.

        PolicyError or ModelError if they cannot be reused, InputError if not in the store's encoding.
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
        """Call it with every event; returns a function that unsubscribes."""
        return self.events.subscribe(subscriber)

    def counters(self) -> dict[str, int]:
        return self.events.counters()

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for queued writes and prefetches; False on time-out."""
        return self._write_queue.flush(timeout_s) and self._fetch_queue.flush(timeout_s)

    def close(self) -> None:
        """Finish queued writes; release memory, folder locks and connections."""
        self._fetch_queue.close()
        self._write_queue.close()
        for tier in self.tiered.tiers:
            tier.close()
        if self.device is not None:
            self.device.close()

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
