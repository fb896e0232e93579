"""The service of a model in this process: continuous batching over its arena, and the prefix store."""

from __future__ import annotations

import json
import warnings
from typing import Any

from kvfold.core import ModelSpec
from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.jobs import PrefixSharing
from kvfold.engine.scheduling.kv_bounds import KVBounds
from kvfold.engine.scheduling.scheduler import Scheduler
from kvfold.engine.warm_up import warm_up
from kvfold.errors import InputError, KvfoldWarning, ModelError, OutOfPages, PolicyError
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.plurals import counted
from kvfold.policy.policy import Policy
from kvfold.policy.size import bytes_text
from kvfold.serve.api.request import ChatRequest
from kvfold.serve.cache.breakpoints import CachePlan, boundaries_of, compression_points
from kvfold.serve.cache.source import CachedSource, Miss, PlainSource, PromptCache
from kvfold.serve.prompt import Prompt
from kvfold.serve.reply import RequestContext
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings
from kvfold.store.entry.encodings import ENCODINGS, check_encoding
from kvfold.store.markers import CacheMarkers
from kvfold.store.store import PrefixStore, check_reuse, kind_of


def check_served_form(name: str) -> None:
    """InputError for an unknown or a lossy encoding: a hit in a byte tier would differ from one on the device."""
    check_encoding(name)
    if not ENCODINGS[name].is_exact:
        exact = " or ".join(form.name for form in ENCODINGS.values() if form.is_exact)
        raise InputError(
            f"the form {name} is lossy: replies after a cache hit would differ from replies after a miss; "
            f'use {exact}, or a policy that stores less, such as "full + int4"'
        )


class LocalService(Service):
    """Owns the scheduler; the caller closes the store."""

    scheduler: Scheduler

    def __init__(self, model: Model, policy: str | Policy, settings: Settings, store: PrefixStore | None) -> None:
        policy = Policy.parse(policy)
        check_policy(policy, model.spec)
        if store is not None:
            check_served_form(store.form)
        self._runner = Runner(model.hf, model.spec, model.arena, compile=model.compile, joins=True)
        longest = longest_held(self._runner, policy)
        super().__init__(model.tokenizer, longest, policy, settings)
        self.model, self.store = model, store
        if longest < model.spec.max_positions:
            self.bound = "of the KV-cache memory, --memory"
        self.no_reuse = None if store is not None else "this server was started without a prefix store"
        self._has_points = has_compression_points(policy, model.spec)
        self._prompt_caches: dict[str, PromptCache] = {}
        if store is not None:
            try:
                self._prompt_cache("")
            except (PolicyError, ModelError) as error:  # they rule reuse out, as question-aware scores do
                self.no_reuse = str(error)
        limits, device = settings.limits, None if store is None else store.device
        self.scheduler = Scheduler(
            self._runner,
            policy,
            model.tokenizer,
            max_running=limits.running,
            max_waiting=limits.waiting,
            num_reserved=settings.num_reserved,
            evict_idle=lambda: device is not None and device.shrink(),
            on_failure=lambda: self.on_failure(),
            flush=self.flush,
            takes_texts=self.takes_texts,
            settle=self.settle,
        )
        self._add_gauges()

    def _add_gauges(self) -> None:
        arena, scheduler, gauge, counter = self.model.arena, self.scheduler, self.metrics.gauge, self.metrics.counter
        gauge("kvfold_requests_running", "Running requests (KV pages allocated).", lambda: scheduler.num_running)
        gauge("kvfold_requests_waiting", "Queued requests (no KV pages yet).", lambda: scheduler.num_waiting)
        counter("kvfold_preemptions_total", "Preemptions: KV caches swapped to host.", lambda: scheduler.num_preempted)
        gauge("kvfold_replies_demoted", "Until 0.2; use kvfold_preemptions_total.", lambda: scheduler.num_preempted)
        counter(
            "kvfold_requests_cancelled_total", "Requests cancelled by their client.", lambda: scheduler.num_cancelled
        )
        gauge("kvfold_arena_bytes", "KV-cache capacity in bytes.", lambda: arena.capacity_bytes)
        gauge("kvfold_arena_free_bytes", "Free KV-cache bytes.", lambda: arena.free_bytes)
        device = None if self.store is None else self.store.device
        if device is not None:
            gauge("kvfold_arena_prefix_bytes", "KV-cache bytes of cached prefixes.", lambda: device.arena_bytes)

    def check_fits(self, policy: Policy) -> None:
        check_policy(policy, self.model.spec)

    def warm_up(self) -> None:
        """The scheduler's thread is idle, so this one may touch model and arena."""
        warm_up(self._runner, self.policy, self.scheduler.max_running)

    def held_bytes(self) -> tuple[int, int]:
        arena = self.model.arena
        return arena.capacity_bytes - arena.free_bytes, arena.capacity_bytes

    def source(self, request: ChatRequest, context: RequestContext, prompt: Prompt) -> tuple[PlainSource, CachePlan]:
        boundaries = boundaries_of(request, prompt, f"{context.cache_key}|{request.model}")
        if context.planner is None or self.no_reuse is not None:
            plan = CachePlan(boundaries)
        else:
            plan = context.planner(boundaries, self.settings.min_tokens(request.model))
            if self._has_points:  # the last token is computed, and a compressed prompt cannot lose its last one
                plan = plan.before(len(prompt.tokens))
        # Compression points do not depend on cache markers; None: compressed at the prompt's end, or not at all.
        has_points = self._has_points and prompt.ends
        points = compression_points(boundaries, self.settings.point_tokens) if has_points else None
        if not plan.writes and not plan.candidates:
            miss: Miss = "unmarked" if self.no_reuse is None else "refused"
            return PlainSource(self.new_sequence, len(prompt.tokens), miss, points), plan
        cache = self._prompt_cache(context.tenant, context.cache_key)
        return CachedSource(cache, prompt.tokens, plan, context.at, self.clock, points), plan

    def sharing(self, source: PlainSource, context: RequestContext) -> PrefixSharing | None:
        """Requests of one tenant and cache key share prefixes while they run."""
        if self.no_reuse is not None:
            return None
        scope = json.dumps([context.tenant, context.cache_key])
        return PrefixSharing(scope, source.saved if self._has_points else None)

    def new_sequence(self, policy: Policy | None = None) -> Any:
        """Under the server's policy or another; called in the scheduler's thread."""
        return self._runner.new_sequence(policy or self.policy)

    def _prompt_cache(self, tenant: str, cache_key: str = "") -> PromptCache:
        assert self.store is not None
        if tenant not in self._prompt_caches:
            facts = {"prefill_len": self._runner.chunk_len, "tenant": tenant}
            prefixes = self.store.prefixes(self.model, self.policy, **facts)  # type: ignore[arg-type]
            self._prompt_caches[tenant] = PromptCache(prefixes, CacheMarkers(self.store, prefixes.binding))
        cache = self._prompt_caches[tenant]
        return cache.split(cache_key) if cache_key else cache


def longest_held(runner: Runner, policy: Policy) -> int:
    """The most tokens of a request, prompt and reply: what the model takes or, if nothing is evicted, the arena holds.
    A KvfoldWarning tells of the latter; OutOfPages if it holds none."""
    most, arena = runner.spec.max_positions, runner.arena
    if not policy.keeps_all:
        return most
    found = KVBounds(runner, policy).most_tokens(most)
    held = f"the arena (KV-cache memory) of {bytes_text(arena.capacity_bytes)} holds {counted(found, 'token')}"
    if found < 2:
        raise OutOfPages(f'{held} under "{policy.short}"; give more --memory')
    if found < most:
        message = f'{held} of a request under "{policy.short}", the model takes {most}: longer requests are refused'
        warnings.warn(message, KvfoldWarning, stacklevel=1)
    return found


def has_compression_points(policy: Policy, spec: ModelSpec) -> bool:
    """Whether prompts are compressed at points: not under a lossless policy, nor under question-aware scores."""
    try:
        check_reuse(policy, spec)
    except (PolicyError, ModelError):
        return False
    return kind_of(policy, spec) == "snapshots"
