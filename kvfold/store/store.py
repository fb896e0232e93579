"""The prefix cache (automatic prefix caching across requests): tiers of KV prefixes, looked up by prompt tokens.

    store = PrefixStore([HostTier(8 << 30), DiskTier("prefixes", 100 << 30)], device=DeviceTier(4 << 30))
    prefixes = store.prefixes(model, "full", prefill_len=runner.chunk_len)
    hit = prefixes.lookup(tokens)
    runner.prefill([hit.sequence], [tokens[hit.matched_tokens :]])
    prefixes.save(hit.sequence, tokens)

Invalid entries and tier failures are misses with an event that gives the reason; they never raise to the caller.

Prefixes are bound to model, tokenizer, policy and tenant. Under a lossless policy the KV cache is stored in chunks,
which every prompt with the same beginning can reuse. Under an evicting policy or a codec fitted to its input, KV
depends on where it was compressed: it is stored as a snapshot at that length and reused by prompts that begin with
exactly those tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvfold.core import ModelSpec
from kvfold.errors import InputError, ModelError, PolicyError
from kvfold.models.loader import Model
from kvfold.pages.page_config import PageConfig
from kvfold.policy.policy import Policy
from kvfold.policy.registry import term_of
from kvfold.store.context import StoreContext
from kvfold.store.entry.format import signer_of
from kvfold.store.events import Subscriber
from kvfold.store.key import Binding, Kind, digest_text
from kvfold.store.prefixes import Prefixes

if TYPE_CHECKING:
    from kvfold.store.kv_events.blocks import Change


def bind(
    model: Model,
    policy: Policy,
    config: PageConfig,
    *,
    prefill_len: int,
    chunk_len: int,
    tenant: str,
    form: str = "exact",
    signer: str = "",
) -> Binding:
    """PolicyError or ModelError if prefixes cannot be reused; InputError if not in this encoding (`form`)."""
    check_reuse(policy, model.spec)
    kind = kind_of(policy, model.spec)
    if kind == "snapshots" and form != "exact":
        raise InputError(
            f'prefixes of {model.spec.name} under "{policy.short}" are snapshots, which support the form exact only, '
            f"not {form}; use exact, or a lossless policy such as full"
        )
    return Binding(
        kind=kind,
        weights=model.values_digest,
        dtype=str(model.spec.dtype),
        kv_dtype=str(model.spec.kv_dtype),
        rope=digest_text(repr([layer.rope for layer in model.spec.layers])),
        tokenizer=tokenizer_digest(model.tokenizer),
        policy=policy.fingerprint,
        pages="" if kind == "chunks" else f"{config.page_size}/{config.open_len}",
        prefill_len=prefill_len,
        chunk_len=chunk_len,
        tenant=tenant,
        form=form,
        signer=signer,
    )


def kind_of(policy: Policy, spec: ModelSpec) -> Kind:
    """Snapshots also for sliding-window layers: they have dropped tokens that a shorter prefix would need."""
    has_windows = len(spec.compressible_layers) < spec.num_layers
    is_lossless = all(codec.lossless for codec in policy.codec.codecs)
    return "chunks" if is_lossless and policy.keeps_all and not has_windows else "snapshots"


def check_reuse(policy: Policy, spec: ModelSpec) -> None:
    stage = policy.prefill
    if stage.evicts and stage.score.needs.judges_by_end:
        raise PolicyError(
            f'policy "{policy.short}": score {term_of(stage.score).name} is question-aware (it scores by the end of '
            "the prompt), and a cached prefix is compressed before its question arrives; to reuse prefixes, use a "
            "question-agnostic score such as kvzip or keydiff"
        )
    if policy.token_pruning.prunes:
        raise PolicyError(
            f'policy "{policy.short}": {term_of(policy.token_pruning).name} prunes tokens by the end of the prompt, '
            "and a cached prefix is prefilled before its question arrives; to reuse prefixes, use dense"
        )
    if any(layer.rope is not None and layer.rope.depends_on_length for layer in spec.layers):
        raise ModelError(
            f"{spec.name} uses length-dependent RoPE scaling (dynamic NTK), so its prefixes cannot be reused across "
            "prompts; to reuse them, use another model"
        )


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of a fast tokenizer's serialization, else of the vocabulary."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return digest_text(backend.to_str())
    return digest_text(repr(sorted(tokenizer.get_vocab().items())))


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

    def publish_blocks(self, publish: Callable[[Change], None]) -> None:
        """Call it with KV events from now on: which blocks of token ids the tiers of this process hold."""
        from kvfold.store.kv_events.blocks import BlockIndex  # here: it needs an extra

        self._blocks = BlockIndex(publish, [tier.name for tier in self.tiered.tiers if tier.is_shared])
        self.events.subscribe(self._blocks.on_event)

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

    def __exit__(self, *_: object) -> None:
        self.close()
