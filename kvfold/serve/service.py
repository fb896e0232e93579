"""One model served to many: prompts, the prompt cache, the scheduler, and who may have how much of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from kvfold.core import ModelSpec
from kvfold.engine.jobs import Job
from kvfold.engine.runner import Runner
from kvfold.engine.scheduler import Scheduler
from kvfold.errors import InputError, ModelError, Overloaded, PolicyError
from kvfold.models.check import check_policy
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.serve.api.errors import ApiError, bad_request
from kvfold.serve.api.request import Ask
from kvfold.serve.cache.cache_breakpoints import Place, Plan, places_of, points_of
from kvfold.serve.cache.diagnostics import Diagnoses
from kvfold.serve.cache.entries import Miss
from kvfold.serve.cache.prompt_cache import Shelf
from kvfold.serve.cache.source import CachedSource, PlainSource
from kvfold.serve.inbox import Inbox
from kvfold.serve.ops.metrics import Metrics
from kvfold.serve.ops.recent_requests import Recent
from kvfold.serve.ops.request_trace import Watched
from kvfold.serve.preprocess import Intake
from kvfold.serve.prompt import Prompt, Prompter
from kvfold.serve.reply import Reply, Start, late
from kvfold.serve.settings import Settings
from kvfold.store.binding import check_reuse, kind_of
from kvfold.store.cache_markers import Marks
from kvfold.store.entry.encodings import FORMS, check_form
from kvfold.store.store import PrefixStore

T = TypeVar("T")


def check_served_form(name: str) -> None:
    """InputError for a form that is none, or that loses something: a request would be answered over what was computed
    while the device holds it, and over what was lost in it later."""
    check_form(name)
    if not FORMS[name].is_exact:
        exact = " or ".join(form.name for form in FORMS.values() if form.is_exact)
        raise InputError(
            f"the form {name} loses something: a reply over a stored prefix would differ from one over a computed one; "
            f'use {exact}, or a policy that stores less, such as "full + int4"'
        )


class Service:
    """Owns the scheduler; the store is the caller's to close."""

    def __init__(self, model: Model, policy: str | Policy, settings: Settings, store: PrefixStore | None) -> None:
        self.model = model
        self.policy = Policy.parse(policy)
        check_policy(self.policy, model.spec)
        if store is not None:
            check_served_form(store.form)
        self.settings = settings
        self.store = store
        self.metrics = Metrics()
        self.diagnoses = Diagnoses()
        self.prompter = Prompter(model.tokenizer, model.spec.max_positions)
        self.intake = Intake(replace(settings.limits, per_tenant=settings.per_tenant))
        self.body_bytes = settings.limits.body_bytes_for(model.spec.max_positions)
        self.clock = settings.clock or time.time
        self.is_closing = False
        self.on_failure: Callable[[], None] = lambda: None  # called when the scheduler has failed for good
        self.no_reuse: str | None = None if store is not None else "this server was started without a prefix store"
        self._has_points = has_points(self.policy, model.spec)
        self._runner = Runner(model.hf, model.spec, model.arena, compile=model.compile)
        self._shelves: dict[str, Shelf] = {}
        self._running: Counter[str] = Counter()
        self._recent: dict[str, Recent] = {}  # by tenant
        self._find_out_reuse()
        limits = settings.limits
        self.scheduler = Scheduler(
            self._runner,
            self.policy,
            model.tokenizer,
            max_running=limits.running,
            max_waiting=limits.waiting,
            num_reserved=settings.num_reserved,
            evict_idle=self._evict_idle,
            on_failure=lambda: self.on_failure(),
        )
        self._add_gauges()

    def _find_out_reuse(self) -> None:
        """Policies that judge by the question cannot serve cached prefixes; that is said to whoever asks for one."""
        if self.store is None:
            return
        try:
            self._shelf("")
        except (PolicyError, ModelError) as error:
            self.no_reuse = str(error)

    def _evict_idle(self) -> bool:
        return self.store is not None and self.store.device is not None and self.store.device.shrink()

    def _add_gauges(self) -> None:
        arena, scheduler, gauge = self.model.arena, self.scheduler, self.metrics.gauge
        gauge("kvfold_requests_running", "Requests that have memory.", lambda: scheduler.num_running)
        gauge("kvfold_requests_waiting", "Requests that wait for memory.", lambda: scheduler.num_waiting)
        gauge("kvfold_replies_demoted", "Replies that have moved to the host so far.", lambda: scheduler.num_preempted)
        gauge("kvfold_requests_cancelled", "Requests whose client went away so far.", lambda: scheduler.num_cancelled)
        gauge("kvfold_arena_bytes", "Size of the arena.", lambda: arena.capacity_bytes)
        gauge("kvfold_arena_free_bytes", "Bytes of the arena that nobody holds.", lambda: arena.free_bytes)
        device = None if self.store is None else self.store.device
        if device is not None:
            gauge("kvfold_arena_prefix_bytes", "Bytes of the arena that prefixes hold.", lambda: device.arena_bytes)

    @property
    def state(self) -> str:
        """Either "running", or why requests are not answered now: "closing", or what the scheduler says."""
        return "closing" if self.is_closing else self.scheduler.state

    # Asking

    def check_model(self, name: str) -> None:
        if name not in self.settings.names:
            served = f"served: {', '.join(self.settings.names)}; start kvfold serve with --alias NAME to add a name"
            told = f'model: "{name[:80]}" is not served here; {served}'
            raise ApiError(404, told, code="model_not_found")

    async def prompt(self, ask: Ask, start: Start) -> Prompt:
        self.check_model(ask.model)
        return await self.take_in(start.tenant, start.num_bytes, partial(self.prompter.prompt, ask))

    async def take_in(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """What work on a body of so many bytes returns, in its turn; ApiError if that does not come in time."""
        async with _in_time(self.settings.limits.request_s):
            return await self.intake.run(tenant, num_bytes, work)

    async def start(self, ask: Ask, start: Start) -> Reply:
        """A reply that has begun; ApiError if that does not come to be."""
        prompt = await self.prompt(ask, start)
        if not prompt.tokens:
            raise bad_request("prompt: the model's tokenizer finds no token in it; send another text")
        num_left = self.model.spec.max_positions - len(prompt.tokens)
        if num_left < 1:
            most = self.model.spec.max_positions - 1
            raise bad_request(f"prompt is too long: {len(prompt.tokens)} tokens > {most} maximum")
        self._enter(start.tenant)
        inbox = Inbox(self.settings.limits.request_s, partial(self._leave, start.tenant))
        try:
            reply = self._submit(ask, start, prompt, num_left, inbox)
        except BaseException:
            inbox.close()
            raise
        await reply.begin()
        return reply

    def _submit(self, ask: Ask, start: Start, prompt: Prompt, num_left: int, inbox: Inbox) -> Reply:
        source, plan = self._source(ask, start, prompt)
        watched = Watched(source, inbox.tell, start.trail)
        job = Job(
            prompt.tokens,
            watched,
            watched.listen,
            max_new_tokens=min(ask.max_tokens, num_left),
            sampling=ask.sampling,
            stop=ask.stop,
            tenant=start.tenant,
            deadline=time.monotonic() + self.settings.limits.request_s,
        )
        start.trail.queue(ask.model, len(prompt.tokens))
        if self._running.total() > 1:
            source.prefetch()  # it waits for others, and its prefix can travel meanwhile
        try:
            self.scheduler.submit(job)
        except Overloaded as error:
            raise ApiError(529, str(error), retry_after_s=1) from error
        return Reply(
            ask,
            start,
            inbox,
            source,
            plan,
            metrics=self.metrics,
            cancel=partial(self.scheduler.cancel, job),
            timeout_s=self.settings.limits.request_s,
            is_cut=num_left < ask.max_tokens,
        )

    def _source(self, ask: Ask, start: Start, prompt: Prompt) -> tuple[CachedSource | PlainSource, Plan]:
        places = places_of(ask, prompt, f"{start.scope}|{ask.model}")
        if start.plan_with is None or self.no_reuse is not None:
            plan = Plan(places)
        else:
            plan = start.plan_with(places, self.settings.min_tokens(ask.model))
        points = self._points(prompt, places)
        if not plan.marks and not plan.candidates:
            miss: Miss = "unmarked" if self.no_reuse is None else "refused"
            return PlainSource(self._new_sequence, len(prompt.tokens), miss, points), plan
        shelf = self._shelf(start.tenant, start.scope)
        return CachedSource(shelf, prompt.tokens, plan, start.at, self.clock, points), plan

    def _points(self, prompt: Prompt, places: Sequence[Place]) -> list[int] | None:
        """Where a prompt is compressed, marked or not; None: at its end, or nowhere."""
        return points_of(places, self.settings.point_tokens) if self._has_points and prompt.ends else None

    def _new_sequence(self) -> Any:
        return self._runner.new_sequence(self.policy)

    def _shelf(self, tenant: str, cache_key: str = "") -> Shelf:
        assert self.store is not None
        if tenant not in self._shelves:
            facts = {"prefill_len": self._runner.chunk_len, "tenant": tenant}
            prefixes = self.store.prefixes(self.model, self.policy, **facts)  # type: ignore[arg-type]
            self._shelves[tenant] = Shelf(prefixes, Marks(self.store, prefixes.binding))
        shelf = self._shelves[tenant]
        return shelf.split(cache_key) if cache_key else shelf

    def recent(self, tenant: str) -> Recent:
        """Requests of a tenant that has a key, or of anybody where no keys are asked for."""
        if tenant not in self._recent:
            self._recent[tenant] = Recent(self.settings.price)
        return self._recent[tenant]

    # Limits

    def _enter(self, tenant: str) -> None:
        if self.is_closing:
            raise ApiError(529, "the server is shutting down; send the request again", retry_after_s=1)
        most = self.settings.per_tenant
        if self._running[tenant] >= most:
            raise ApiError(429, f"{most} requests of yours are being answered already; wait for one", retry_after_s=1)
        self._running[tenant] += 1

    def _leave(self, tenant: str) -> None:
        self._running[tenant] -= 1

    def num_answering(self) -> int:
        """Requests whose job has not ended: those that count against `--max-per-tenant`."""
        return self._running.total()

    def close(self) -> None:
        self.is_closing = True
        self.intake.close()
        self.scheduler.close()


def has_points(policy: Policy, spec: ModelSpec) -> bool:
    """Whether prompts are compressed at points: not where nothing is lost, nor where the end of the prompt judges."""
    try:
        check_reuse(policy, spec)
    except (PolicyError, ModelError):
        return False
    return kind_of(policy, spec) == "snapshots"


@asynccontextmanager
async def _in_time(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise late(seconds) from None
