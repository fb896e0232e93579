"""The service behind the HTTP API: renders prompts, looks up the prompt cache, submits jobs to the continuous-batching
scheduler, and limits concurrent requests per tenant."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

from kvfold.engine.scheduling.jobs import Job, PrefixSharing
from kvfold.errors import Overloaded
from kvfold.plurals import counted
from kvfold.policy.policy import Policy
from kvfold.serve.api.errors import ApiError, bad_request, prompt_too_long
from kvfold.serve.api.native import client_policy
from kvfold.serve.api.request import ChatRequest
from kvfold.serve.cache.breakpoints import CachePlan
from kvfold.serve.cache.diagnostics import CacheDiagnostics
from kvfold.serve.cache.source import PlainSource
from kvfold.serve.event_queue import EventQueue, Mailbox
from kvfold.serve.memory import RequestMemory
from kvfold.serve.ops.metrics import Metrics
from kvfold.serve.ops.recent_requests import RecentRequests
from kvfold.serve.ops.request_trace import TracedSource
from kvfold.serve.preprocess import Preprocessor
from kvfold.serve.prompt import Prompt, PromptRenderer
from kvfold.serve.reply import Reply, RequestContext, timed_out
from kvfold.serve.settings import Settings
from kvfold.serve.shorten import RequestShortener
from kvfold.store.store import PrefixStore

T = TypeVar("T")


class JobScheduler(Protocol):
    """What runs jobs: the scheduler of the model in this process, or an engine over HTTP."""

    @property
    def state(self) -> str: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    def submit(self, job: Job) -> None: ...
    def cancel(self, job: Job) -> None: ...
    def close(self, timeout_s: float | None = None) -> bool: ...


class Service:
    """What all engines share; a subclass makes the scheduler at the end of its construction."""

    scheduler: JobScheduler
    store: PrefixStore | None = None
    no_reuse: str | None = None  # why cache markers are refused
    bound = ""  # of what `max_positions` is the maximum, if not of the model

    def __init__(self, tokenizer: Any, max_positions: int, policy: Policy, settings: Settings) -> None:
        self.tokenizer, self.max_positions = tokenizer, max_positions
        self.policy, self.settings = policy, settings
        self._policy_texts = ("", policy.short, str(policy))
        self.metrics = Metrics()
        self.diagnostics = CacheDiagnostics()
        self._memory = None if settings.memory_file is None else RequestMemory(settings.memory_file, self.metrics)
        self.renderer = PromptRenderer(tokenizer, max_positions)
        self.preprocessor = Preprocessor(replace(settings.limits, per_tenant=settings.per_tenant))
        self._shortener = None if policy.shorten is None else RequestShortener(policy.shorten, tokenizer)
        longest = max_positions * (1 if self._shortener is None else self._shortener.times)
        self.body_bytes = settings.limits.body_bytes_for(int(longest))
        self.clock = settings.clock or time.time
        self.is_closing = False
        self.on_failure: Callable[[], None] = lambda: None  # called when the scheduler has failed
        self.num_running: Counter[str] = Counter()  # by tenant, until their jobs have ended
        self.recents: dict[str, RecentRequests] = {}  # by tenant
        self._mailbox: Mailbox | None = None  # made by the first request, in the event loop

    # What engines differ in

    def source(self, request: ChatRequest, context: RequestContext, prompt: Prompt) -> tuple[PlainSource, CachePlan]:
        """Where a request's KV cache comes from, and what it caches."""
        raise NotImplementedError

    def sharing(self, source: PlainSource, context: RequestContext) -> PrefixSharing | None:
        """With which running requests a request shares prefixes; None: with none."""
        return None

    def check_fits(self, policy: Policy) -> None:
        """KvfoldError if the engine cannot run the policy."""
        raise NotImplementedError

    def held_bytes(self) -> tuple[int, int]:
        """Bytes of KV cache that are in use, and how many there are."""
        raise NotImplementedError

    def warm_up(self) -> None:
        """Compile what requests would wait for; called before the first one."""

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
        if text in self._policy_texts:
            return
        if client_policy(text, "kvfold.policy").fingerprint != self.policy.fingerprint:
            served = f'"{self.policy.short}" is served here; send that, leave it out, or ask another server'
            raise bad_request(f'kvfold.policy: {served}, not "{text[:80]}"', logged=f"kvfold.policy: {served}")

    async def prompt(self, request: ChatRequest, context: RequestContext, *, shortens: bool = True) -> Prompt:
        """`shortens`: as the server's policy says."""
        self.check_model(request.model)
        self.check_policy(request.policy)
        work, is_quick = partial(self._render, request, shortens), self._shortener is None or not shortens
        return await self.preprocess(context.tenant, context.num_bytes, work, is_quick=is_quick)

    def _render(self, request: ChatRequest, shortens: bool) -> Prompt:
        if self._shortener is None or not shortens:
            return self.renderer.prompt(request)
        request, num_cut = self._shortener.shorten(request)
        return replace(self.renderer.prompt(request), num_cut=num_cut)

    async def preprocess(self, tenant: str, num_bytes: int, work: Callable[[], T], *, is_quick: bool = False) -> T:
        """Result of work on a body of `num_bytes` as the preprocessor does it; ApiError 504 if it times out."""
        try:
            return await self.preprocessor.run(tenant, num_bytes, work, is_quick=is_quick)
        except TimeoutError:
            raise timed_out(self.settings.limits.request_s) from None

    def check_length(self, prompt: Prompt) -> None:
        """400 if no token is left for a reply."""
        if len(prompt.tokens) >= self.max_positions:
            bound = f" {self.bound}" if self.bound else ""
            raise prompt_too_long(f"{len(prompt.tokens)} tokens > {self.max_positions - 1} maximum{bound}")

    async def start(self, request: ChatRequest, context: RequestContext) -> Reply:
        """A reply whose prefill is done; ApiError if the request is refused or fails."""
        plain = request
        request, prompt = await self._remembering(request, context)
        if not prompt.tokens:
            raise bad_request("prompt: it has no tokens; send another text")
        self.check_length(prompt)
        num_left = self.max_positions - len(prompt.tokens)
        self.acquire_slot(context.tenant)
        events = self.event_queue(context.tenant)
        try:
            reply = self._submit(request, context, prompt, num_left, events, self._keeper(plain, context))
        except BaseException:
            events.close()
            raise
        await reply.begin()
        if self._memory is not None:
            self._memory.count_request(request, context.tenant)
        return reply

    def event_queue(self, tenant: str) -> EventQueue:
        """For a job of a tenant that has acquired a slot, which is released when the job ends."""
        loop = asyncio.get_running_loop()
        if self._mailbox is None or self._mailbox.loop is not loop:
            self._mailbox = Mailbox(loop)
        return EventQueue(self._mailbox, self.settings.limits.request_s, partial(self.release_slot, tenant))

    def takes_texts(self) -> bool:
        """Whether texts that a scheduler tells its listeners of now are delivered with the next flush."""
        return self._mailbox is None or self._mailbox.takes_texts

    def flush(self) -> None:
        """Deliver what a scheduler has told its listeners; called in its thread."""
        if self._mailbox is not None:
            self._mailbox.flush()

    def settle(self, timeout_s: float) -> None:
        """Wait, at most so long, until requests that have arrived are submitted; called in a scheduler's thread."""
        if self._mailbox is not None:
            self._mailbox.settle(timeout_s)

    async def _remembering(self, request: ChatRequest, context: RequestContext) -> tuple[ChatRequest, Prompt]:
        """The request with facts that are recalled for it, and its prompt; without them where they do not fit."""
        if self._memory is None or not request.user:
            return request, await self.prompt(request, context)
        work = partial(self._memory.with_facts, request, context.tenant, context.at)
        more = await self.preprocess(context.tenant, context.num_bytes, work)
        if more is not request:
            with suppress(ApiError):
                prompt = await self.prompt(more, context)
                if len(prompt.tokens) < self.max_positions:
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
        source, plan = self.source(request, context, prompt)
        traced = TracedSource(source, events.put, context.trace)
        job = Job(
            prompt.tokens,
            traced,
            traced.listen,
            max_new_tokens=min(request.max_tokens, num_left),
            sampling=request.sampling,
            stop=request.stop,
            has_seed=request.has_seed,
            ignores_eos=request.ignores_eos,
            tenant=context.tenant,
            deadline=time.monotonic() + self.settings.limits.request_s,
            sharing=self.sharing(source, context),
            is_streamed=context.is_streamed,
        )
        context.trace.queue(request.model, len(prompt.tokens))
        if self.num_running.total() > 1:
            source.prefetch()  # while it is queued
        try:
            self.scheduler.submit(job)
        except Overloaded as error:
            context.trace.queued = None
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
            who, options = self.settings.bound_of_tenants
            message = f"{who} has {counted(most, 'request')} running or queued ({options}); wait for one"
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
