"""The service behind the HTTP API: renders prompts, looks up the prompt cache, submits jobs to the continuous-batching
scheduler, and limits concurrent requests per tenant."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvfold.core import ModelSpec
from kvfold.engine.runner import Runner
from kvfold.engine.scheduling.jobs import Job, PrefixSharing
from kvfold.engine.scheduling.scheduler import Scheduler
from kvfold.errors import InputError, ModelError, Overloaded, PolicyError
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.serve.api.errors import ApiError, bad_request, prompt_too_long
from kvfold.serve.api.native import client_policy
from kvfold.serve.api.request import ChatRequest
from kvfold.serve.cache.breakpoints import CachePlan, boundaries_of, compression_points
from kvfold.serve.cache.diagnostics import CacheDiagnostics
from kvfold.serve.cache.source import CachedSource, Miss, PlainSource, PromptCache
from kvfold.serve.memory import RequestMemory
from kvfold.serve.ops.metrics import Metrics
from kvfold.serve.ops.recent_requests import RecentRequests
from kvfold.serve.ops.request_trace import TracedSource
from kvfold.serve.preprocess import Preprocessor
from kvfold.serve.prompt import Prompt, PromptRenderer
from kvfold.serve.reply import EventQueue, Reply, RequestContext, timed_out
from kvfold.serve.settings import Settings
from kvfold.serve.shorten import RequestShortener
from kvfold.store.entry.encodings import ENCODINGS, check_encoding
from kvfold.store.markers import CacheMarkers
from kvfold.store.store import PrefixStore, check_reuse, kind_of

T = TypeVar("T")


def check_served_form(name: str) -> None:
    """InputError for an unknown or a lossy encoding: a hit in a byte tier would differ from one on the device."""
    check_encoding(name)
    if not ENCODINGS[name].is_exact:
        exact = " or ".join(form.name for form in ENCODINGS.values() if form.is_exact)
        raise InputError(
            f"the form {name} is lossy: replies after a cache hit would differ from replies after a miss; "
            f'use {exact}, or a policy that stores less, such as "full + int4"'
        )


class Service:
    """Owns the scheduler; the caller closes the store."""

    def __init__(self, model: Model, policy: str | Policy, settings: Settings, store: PrefixStore | None) -> None:
        self.model = model
        self.policy = Policy.parse(policy)
        check_policy(self.policy, model.spec)
        if store is not None:
            check_served_form(store.form)
        self.settings = settings
        self.store = store
        self.metrics = Metrics()
        self.diagnostics = CacheDiagnostics()
        self._memory = None if settings.memory_file is None else RequestMemory(settings.memory_file, self.metrics)
        self.renderer = PromptRenderer(model.tokenizer, model.spec.max_positions)
        self.preprocessor = Preprocessor(replace(settings.limits, per_tenant=settings.per_tenant))
        plan = self.policy.shorten
        self._shortener = None if plan is None else RequestShortener(plan, model)
        longest = model.spec.max_positions * (1 if self._shortener is None else self._shortener.times)
        self.body_bytes = settings.limits.body_bytes_for(int(longest))
        self.clock = settings.clock or time.time
        self.is_closing = False
        self.on_failure: Callable[[], None] = lambda: None  # called when the scheduler has failed
        self.no_reuse: str | None = None if store is not None else "this server was started without a prefix store"
        self._has_points = has_compression_points(self.policy, model.spec)
        self._runner = Runner(model.hf, model.spec, model.arena, compile=model.compile)
        self._prompt_caches: dict[str, PromptCache] = {}
        self.num_running: Counter[str] = Counter()  # by tenant, until their jobs have ended
        self.recents: dict[str, RecentRequests] = {}  # by tenant
        if store is not None:
            try:
                self._prompt_cache("")
            except (PolicyError, ModelError) as error:  # they rule reuse out, as question-aware scores do
                self.no_reuse = str(error)
        limits, device = settings.limits, None if store is None else store.device
        self.scheduler = Scheduler(
            self._runner,
            self.policy,
            model.tokenizer,
            max_running=limits.running,
            max_waiting=limits.waiting,
            num_reserved=settings.num_reserved,
            evict_idle=lambda: device is not None and device.shrink(),
            on_failure=lambda: self.on_failure(),
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

    @property
    def state(self) -> str:
        """The scheduler's state, or "closing"."""
        return "closing" if self.is_closing else self.scheduler.state

    # Requests

    def check_model(self, name: str) -> None:
        if name not in self.settings.names:
            served = f"served: {', '.join(self.settings.names)}; start kvfold serve with --alias NAME to add a name"
            message = f'model: "{name[:80]}" is not served here; {served}'
            raise ApiError(404, message, code="model_not_found")

    def check_policy(self, text: str) -> None:
        """400 unless it is the policy of this server, however it is written."""
        if text in ("", self.policy.short, str(self.policy)):
            return
        if client_policy(text, "kvfold.policy").fingerprint != self.policy.fingerprint:
            served = f'"{self.policy.short}" is served here; send that, leave it out, or ask another server'
            raise bad_request(f'kvfold.policy: {served}, not "{text[:80]}"', logged=f"kvfold.policy: {served}")

    async def prompt(self, request: ChatRequest, context: RequestContext, *, shortens: bool = True) -> Prompt:
        """`shortens`: as the server's policy says."""
        self.check_model(request.model)
        self.check_policy(request.policy)
        return await self.preprocess(context.tenant, context.num_bytes, partial(self._render, request, shortens))

    def _render(self, request: ChatRequest, shortens: bool) -> Prompt:
        if self._shortener is None or not shortens:
            return self.renderer.prompt(request)
        request, num_cut = self._shortener.shorten(request)
        return replace(self.renderer.prompt(request), num_cut=num_cut)

    async def preprocess(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Result of work on a body of `num_bytes` in a preprocessing thread; ApiError 504 if it times out."""
        seconds = self.settings.limits.request_s
        try:
            async with asyncio.timeout(seconds):
                return await self.preprocessor.run(tenant, num_bytes, work)
        except TimeoutError:
            raise timed_out(seconds) from None

    async def start(self, request: ChatRequest, context: RequestContext) -> Reply:
        """A reply whose prefill is done; ApiError if the request is refused or fails."""
        plain = request
        request, prompt = await self._remembering(request, context)
        if not prompt.tokens:
            raise bad_request("prompt: it has no tokens; send another text")
        num_left = self.model.spec.max_positions - len(prompt.tokens)
        if num_left < 1:
            most = self.model.spec.max_positions - 1
            raise prompt_too_long(f"{len(prompt.tokens)} tokens > {most} maximum")
        self.acquire_slot(context.tenant)
        events = EventQueue(self.settings.limits.request_s, partial(self.release_slot, context.tenant))
        try:
            reply = self._submit(request, context, prompt, num_left, events, self._keeper(plain, context))
        except BaseException:
            events.close()
            raise
        await reply.begin()
        return reply

    async def _remembering(self, request: ChatRequest, context: RequestContext) -> tuple[ChatRequest, Prompt]:
        """The request with facts that are recalled for it, and its prompt; without them where they do not fit."""
        if self._memory is None or not request.user:
            return request, await self.prompt(request, context)
        work = partial(self._memory.with_facts, request, context.tenant, context.at)
        more = await self.preprocess(context.tenant, context.num_bytes, work)
        if more is not request:
            with suppress(ApiError):
                prompt = await self.prompt(more, context)
                if len(prompt.tokens) < self.model.spec.max_positions:
                    return more, prompt
        return request, await self.prompt(request, context)

    def _keeper(self, request: ChatRequest, context: RequestContext) -> Callable[[], None]:
        """What is called when the reply is complete."""
        if self._memory is None:
            return lambda: None
        return partial(self._memory.write_later, request, context.tenant, context.at)

    def _submit(
        self,
        request: ChatRequest,
        context: RequestContext,
        prompt: Prompt,
        num_left: int,
        events: EventQueue,
        on_complete: Callable[[], None],
    ) -> Reply:
        source, plan = self._source(request, context, prompt)
        traced = TracedSource(source, events.put, context.trace)
        job = Job(
            prompt.tokens,
            traced,
            traced.listen,
            max_new_tokens=min(request.max_tokens, num_left),
            sampling=request.sampling,
            stop=request.stop,
            ignores_eos=request.ignores_eos,
            tenant=context.tenant,
            deadline=time.monotonic() + self.settings.limits.request_s,
            sharing=self._sharing(source, context),
        )
        context.trace.queue(request.model, len(prompt.tokens))
        if self.num_running.total() > 1:
            source.prefetch()  # while it is queued
        try:
            self.scheduler.submit(job)
        except Overloaded as error:
            raise ApiError(529, str(error), retry_after_s=1) from error
        return Reply(
            request,
            context,
            events,
            source,
            plan,
            metrics=self.metrics,
            cancel=partial(self.scheduler.cancel, job),
            timeout_s=self.settings.limits.request_s,
            is_cut=num_left < request.max_tokens,
            num_cut=None if self._shortener is None else prompt.num_cut,
            on_complete=on_complete,
        )

    def _source(self, request: ChatRequest, context: RequestContext, prompt: Prompt) -> tuple[PlainSource, CachePlan]:
        boundaries = boundaries_of(request, prompt, f"{context.cache_key}|{request.model}")
        if context.planner is None or self.no_reuse is not None:
            plan = CachePlan(boundaries)
        else:
            plan = context.planner(boundaries, self.settings.min_tokens(request.model))
        # Compression points do not depend on cache markers; None: compressed at the prompt's end, or not at all.
        has_points = self._has_points and prompt.ends
        points = compression_points(boundaries, self.settings.point_tokens) if has_points else None
        if not plan.writes and not plan.candidates:
            miss: Miss = "unmarked" if self.no_reuse is None else "refused"
            return PlainSource(self.new_sequence, len(prompt.tokens), miss, points), plan
        cache = self._prompt_cache(context.tenant, context.cache_key)
        return CachedSource(cache, prompt.tokens, plan, context.at, self.clock, points), plan

    def _sharing(self, source: PlainSource, context: RequestContext) -> PrefixSharing | None:
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

    def recent(self, tenant: str) -> RecentRequests:
        """Recent requests of a tenant; without API keys all requests have one tenant."""
        if tenant not in self.recents:
            self.recents[tenant] = RecentRequests(self.settings.price)
        return self.recents[tenant]

    # Limits

    def acquire_slot(self, tenant: str) -> None:
        if self.is_closing:
            raise ApiError(529, "the server is shutting down; send the request again", retry_after_s=1)
        most = self.settings.per_tenant
        if self.num_running[tenant] >= most:
            message = f"{most} requests of this tenant are running or queued (--max-per-tenant); wait for one"
            raise ApiError(429, message, retry_after_s=1)
        self.num_running[tenant] += 1

    def release_slot(self, tenant: str) -> None:
        self.num_running[tenant] -= 1

    def close(self) -> None:
        self.is_closing = True
        self.preprocessor.close()
        self.scheduler.close()
        if self._memory is not None:
            self._memory.close()


def has_compression_points(policy: Policy, spec: ModelSpec) -> bool:
    """Whether prompts are compressed at points: not under a lossless policy, nor under question-aware scores."""
    try:
        check_reuse(policy, spec)
    except (PolicyError, ModelError):
        return False
    return kind_of(policy, spec) == "snapshots"
