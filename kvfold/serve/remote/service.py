"""The service whose replies an engine computes: prompts are rendered, tokenized and packed here."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from kvfold.errors import InputError
from kvfold.packed.pack import check_policy_packable
from kvfold.policy.policy import Policy
from kvfold.serve.api.request import ChatRequest
from kvfold.serve.cache.breakpoints import CachePlan, boundaries_of
from kvfold.serve.cache.source import Entries, PlainSource
from kvfold.serve.prompt import Prompt
from kvfold.serve.remote.http import EngineHttp
from kvfold.serve.remote.packer import Packer
from kvfold.serve.remote.scheduler import RemoteScheduler
from kvfold.serve.remote.source import EngineSource, pack_boundary
from kvfold.serve.reply import RequestContext
from kvfold.serve.service import Service
from kvfold.serve.settings import Settings

FULL = Policy.parse("full")


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of its model: its name there, and how many tokens a prompt and its reply may have."""

    model: str
    max_positions: int

    @classmethod
    async def ask(cls, http: EngineHttp) -> EngineFacts:
        """InputError if it serves several models."""
        models = [one for one in (await http.json("GET", "/v1/models")).get("data", ()) if not one.get("parent")]
        names = {one.get("id"): one for one in models}
        if not names:
            raise InputError("the engine lists no model; give --engine the address of a vLLM server")
        first = models[0]
        if any(_window(one) != _window(first) for one in models):
            raise InputError(f"the engine serves several models ({', '.join(map(str, names))}); start it with one")
        return cls(str(first["id"]), _window(first))


def _window(card: dict[str, Any]) -> int:
    """vLLM's name for it, or kvfold's own."""
    if isinstance(found := card.get("max_model_len"), int):
        return found
    if isinstance(found := card.get("max_input_tokens"), int):
        return found + 1
    raise InputError("the engine does not tell how long its prompts may be (max_model_len); give a vLLM server")


def needs_model(policy: Policy) -> bool:
    """Whether prompts are packed here; PolicyError for a policy that can be neither packed nor left to the engine."""
    if policy.fingerprint == FULL.fingerprint:
        return False
    check_policy_packable(policy)
    return True


class RemoteService(Service):
    """Made in the event loop's thread or before it runs; owns the packer."""

    scheduler: RemoteScheduler

    def __init__(
        self,
        tokenizer: Any,
        facts: EngineFacts,
        http: EngineHttp,
        policy: Policy,
        settings: Settings,
        packer: Packer | None = None,
    ) -> None:
        super().__init__(tokenizer, facts.max_positions, policy, settings)
        self._packer = packer
        self._entries: defaultdict[str, Entries] = defaultdict(Entries)  # by tenant
        limits = settings.limits
        self.scheduler = scheduler = RemoteScheduler(
            http, facts.model, packer, self.metrics, max_running=limits.running, max_waiting=limits.waiting
        )
        gauge, counter = self.metrics.gauge, self.metrics.counter
        gauge("kvfold_requests_running", "Requests that the engine runs.", lambda: scheduler.num_running)
        gauge("kvfold_requests_waiting", "Queued requests.", lambda: scheduler.num_waiting)
        text = "Requests cancelled by their client."
        counter("kvfold_requests_cancelled_total", text, lambda: scheduler.num_cancelled)

    def source(self, request: ChatRequest, context: RequestContext, prompt: Prompt) -> tuple[PlainSource, CachePlan]:
        boundaries = boundaries_of(request, prompt, f"{context.cache_key}|{request.model}")
        least = self.settings.min_tokens(request.model)
        plan = CachePlan(boundaries) if context.planner is None else context.planner(boundaries, least)
        packed = None if self._packer is None else pack_boundary(boundaries, self.settings.point_tokens)
        entries, salt = self._entries[context.tenant], self._salt(context)
        num_tokens = len(prompt.tokens)
        return EngineSource(num_tokens, plan, entries, context.at, self.clock, packed=packed, salt=salt), plan

    def _salt(self, context: RequestContext) -> str:
        """Tenants and cache keys share no blocks of the engine."""
        if not self.settings.has_tenants and not context.cache_key:
            return ""
        return hashlib.sha256(json.dumps([context.tenant, context.cache_key]).encode()).hexdigest()

    def check_fits(self, policy: Policy) -> None:
        needs_model(policy)

    def held_bytes(self) -> tuple[int, int]:
        return 0, 0  # the engine's, which its own metrics tell

    def close(self) -> None:
        super().close()
        if self._packer is not None:
            self._packer.close()
