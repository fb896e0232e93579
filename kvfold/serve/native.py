"""Routes under /v1/kvfold, for clients without Python: shorten a text, sizes of a text, policies, statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from kvfold.errors import KvfoldError
from kvfold.policy.policy import Policy
from kvfold.serve.api.errors import ApiError, bad_request
from kvfold.serve.api.native import (
    ShortenBody,
    all_terms,
    compressed,
    explained,
    read_compress,
    read_policies,
    read_shorten,
    read_stats,
    shortened,
)
from kvfold.serve.disconnect import cancel_on_disconnect
from kvfold.serve.local_service import LocalService
from kvfold.serve.measure import sizes_of
from kvfold.serve.middleware import Handler, RequestMiddleware
from kvfold.serve.ops.dashboard import samples, totals
from kvfold.serve.reply import RequestContext
from kvfold.serve.service import Service
from kvfold.shortening.shorten import Shortened, shorten_text

T = TypeVar("T")


class Read(Protocol):
    """`App`'s: the JSON of a body within its limits, through a parser."""

    async def __call__(self, request: Request, tenant: str, read: Callable[[object], T]) -> T: ...


class NativeRoutes:
    """Handlers by path."""

    def __init__(self, service: Service, middleware: RequestMiddleware, read: Read) -> None:
        self._service, self._middleware, self._read = service, middleware, read
        self._tokenizer = copy.deepcopy(service.tokenizer)  # used in preprocessing threads

    @property
    def handlers(self) -> dict[str, Handler]:
        return {
            "/v1/kvfold/compress": self._compress,
            "/v1/kvfold/shorten": self._shorten,
            "/v1/kvfold/policies": self._policies,
            "/v1/kvfold/stats": self._stats,
        }

    async def _compress(self, request: Request) -> Response:
        tenant = self._middleware.tenant(request)
        body = await self._read(request, tenant, read_compress)
        service = self._service
        if not isinstance(service, LocalService):
            raise ApiError(404, "sizes are measured by a model in this server; this one asks an engine (--engine)")
        if not getattr(self._tokenizer, "chat_template", None):
            raise bad_request("this model has no chat template, in which texts are measured; serve an instruct model")
        policy = service.policy if body.policy is None else body.policy
        if body.policy is not None:
            self._check(body.policy)
        context = RequestContext(tenant, request.state.at, trace=request.state.trace, num_bytes=request.state.num_bytes)
        stats = await cancel_on_disconnect(
            request.scope, request.receive, sizes_of(service, body.request, policy, context)
        )
        return JSONResponse(compressed(body.request.model, policy, stats))

    def _check(self, policy: Policy) -> None:
        """400 for what this model cannot run, or for text that is shortened before."""
        misfit = self._misfit(policy)
        if misfit is None and policy.shorten is not None:
            misfit = "shorten(...) cuts the text before it is read; send the text to /v1/kvfold/shorten first"
        if misfit is not None:
            raise bad_request(f"policy: {misfit}")

    def _misfit(self, policy: Policy) -> str | None:
        try:
            self._service.check_fits(policy)
        except KvfoldError as error:
            return str(error)
        return None

    async def _shorten(self, request: Request) -> Response:
        tenant = self._middleware.tenant(request)
        body = await self._read(request, tenant, read_shorten)
        self._service.check_model(body.model)
        work = self._service.preprocess(tenant, request.state.num_bytes, partial(self._cut, body))
        return JSONResponse(shortened(body.model, await cancel_on_disconnect(request.scope, request.receive, work)))

    def _cut(self, body: ShortenBody) -> Shortened:
        try:
            return shorten_text(body.text, body.plan, question=body.question, tokenizer=self._tokenizer)
        except KvfoldError as error:
            raise bad_request(f"text: it cannot be shortened: {error}") from error

    async def _policies(self, request: Request) -> Response:
        tenant = self._middleware.tenant(request)
        policy = await self._read(request, tenant, read_policies)
        if policy is None:
            return JSONResponse(all_terms())
        is_served = policy.fingerprint == self._service.policy.fingerprint
        return JSONResponse(explained(policy, is_served=is_served, misfit=self._misfit(policy)))

    async def _stats(self, request: Request) -> Response:
        tenant = self._middleware.tenant(request)
        await self._read(request, tenant, read_stats)
        recent = self._service.recent(tenant)
        found = {"object": "kvfold.stats", "tenant": tenant, **totals(recent)}
        return JSONResponse({**found, **samples(recent, request)})
