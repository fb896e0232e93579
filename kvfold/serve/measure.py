"""Sizes of a prompt's KV cache under any policy: the scheduler prefills it as a job of its own and drops it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvfold.engine.scheduling.jobs import Ended, Job
from kvfold.errors import Overloaded
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.request import ChatRequest
from kvfold.serve.cache.source import PlainSource
from kvfold.serve.local_service import LocalService
from kvfold.serve.reply import RequestContext, api_error, timed_out
from kvfold.stats import Stats, measure
from kvfold.store.store import kind_of


class MeasuredSource(PlainSource):
    """Keeps the sizes of the sequence at the end of its prompt."""

    def __init__(self, new_sequence: Callable[[], SequenceCache], num_tokens: int) -> None:
        super().__init__(new_sequence, num_tokens)
        self._num_tokens = num_tokens
        self.stats: Stats | None = None

    def reached(self, sequence: SequenceCache, num_read: int) -> None:
        super().reached(sequence, num_read)
        if num_read == self._num_tokens:
            self.stats = measure(sequence)


async def sizes_of(service: LocalService, request: ChatRequest, policy: Policy, context: RequestContext) -> Stats:
    """ApiError if the request is refused or fails."""
    prompt = await service.prompt(request, context, shortens=policy is service.policy)
    service.check_length(prompt)
    service.acquire_slot(context.tenant)
    seconds = service.settings.limits.request_s
    events = service.event_queue(context.tenant)
    source = MeasuredSource(partial(service.new_sequence, policy), len(prompt.tokens))
    in_chunks = kind_of(policy, service.model.spec) == "chunks"
    job = Job(
        prompt.tokens, source, events.put, max_new_tokens=0, tenant=context.tenant,
        deadline=time.monotonic() + seconds, in_chunks=in_chunks,
    )  # fmt: skip
    try:
        service.scheduler.submit(job)
    except Overloaded as error:
        events.close()
        raise ApiError(529, str(error), retry_after_s=1) from error
    except BaseException:
        events.close()
        raise
    try:
        while not isinstance(event := await events.get(), Ended):
            pass
    finally:
        service.scheduler.cancel(job)
    if event.reason == "late":
        raise timed_out(seconds)
    if event.reason == "cancelled":
        raise ApiError(529, "the server is shutting down; send the request again", retry_after_s=1)
    if event.reason == "failed" or source.stats is None:
        raise api_error(event.error)
    return source.stats
