"""Runs jobs at an engine over its /v1/completions, each as a task of the server's event loop.

    tokens of the prompt    | packed prefix, T tokens      | the rest |
    what the engine gets    | n placeholder ids            | the rest |   and kv_transfer_params that name the entry

vLLM tells whether it served an entry in answers that are not streamed alone. So an entry is checked with a reply of one
token before it is used, and again every half minute. A connector that refuses an entry later cuts the reply to one
token: the first text of a stream is held back until the second one, and the entry is checked again. One that the
engine's store has lost is packed once more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from kvfold.engine.scheduling.jobs import Ended, Event, Job, PrefillDone, TextDelta
from kvfold.errors import InputError, Overloaded
from kvfold.packed.client import PACK_AGAIN, PackedPrefix
from kvfold.plurals import counted
from kvfold.serve.api.errors import ApiError
from kvfold.serve.api.strict_json import Json
from kvfold.serve.ops.metrics import Metrics
from kvfold.serve.ops.request_trace import TracedSource
from kvfold.serve.remote.http import EngineHttp
from kvfold.serve.remote.packer import Packer
from kvfold.serve.remote.source import EngineSource

_PATH = "/v1/completions"
_CHECKED_S = 30.0


class EntryRefused(Exception):
    """The engine did not serve a packed prefix; its words, or None where a stream was cut and does not tell why."""

    def __init__(self, words: str | None = None) -> None:
        super().__init__(words or "its reply was cut to one token")
        self.is_lost = words is not None and words.endswith(PACK_AGAIN)
        self.is_final = words is not None and not self.is_lost


@dataclass(frozen=True)
class EnginePrompt:
    """What the engine reads; `packed`: the entry that its first ids stand for."""

    token_ids: Sequence[int]
    packed: PackedPrefix | None = None


class RemoteScheduler:
    """`model`: its name at the engine. Jobs over `max_running` wait here."""

    num_cancelled = 0

    def __init__(
        self,
        http: EngineHttp,
        model: str,
        packer: Packer | None,
        metrics: Metrics,
        *,
        max_running: int,
        max_waiting: int,
    ) -> None:
        self._http, self._model, self._packer, self._metrics = http, model, packer, metrics
        self._slots, self._most = asyncio.Semaphore(max_running), max_running + max_waiting
        self._tasks: dict[Job, asyncio.Task[None]] = {}
        self._checked: dict[str, float] = {}  # entry -> until when
        self._is_closed = False
        self.num_running = 0

    @property
    def state(self) -> str:
        return "closed" if self._is_closed else "running"

    @property
    def num_waiting(self) -> int:
        return len(self._tasks) - self.num_running

    def submit(self, job: Job) -> None:
        """In the event loop; Overloaded if too many wait."""
        if self._is_closed:
            raise Overloaded("the server is shutting down; send the request to another one")
        if len(self._tasks) >= self._most:
            raise Overloaded(f"the queue has {counted(self.num_waiting, 'request')}; send the request again later")
        self._tasks[job] = asyncio.get_running_loop().create_task(self._run(job))

    def cancel(self, job: Job) -> None:
        """Its connection to the engine is closed, which ends the request there."""
        task = self._tasks.get(job)
        if task is not None:
            task.cancel()

    def close(self, timeout_s: float | None = None) -> bool:
        self._is_closed = True
        for task in self._tasks.values():
            if not task.get_loop().is_closed():
                task.cancel()
        return True

    async def _run(self, job: Job) -> None:
        try:
            async with self._slots:
                self.num_running += 1
                try:
                    await self._answer(job)
                finally:
                    self.num_running -= 1
        except asyncio.CancelledError:
            self.num_cancelled += 1
            job.end(Ended("cancelled"))
        except Exception as error:
            job.end(Ended("failed", error=error))
        finally:
            del self._tasks[job]

    async def _answer(self, job: Job) -> None:
        assert isinstance(job.source, TracedSource) and isinstance(job.source.inner, EngineSource)
        source = job.source.inner
        source.look_up()
        for num_left in (2, 1, 0):
            prompt = await self._prompt(job, source)
            try:
                if prompt.packed is not None:
                    await self._check(prompt, prompt.packed, source.salt, anew=job.max_new_tokens == 1)
                return await self._stream(job, prompt, source.salt)
            except EntryRefused as error:
                self._refused(job, source, prompt, error)
                if error.is_final or num_left == 0:
                    raise ApiError(502, f"the engine did not serve a packed prefix: {error}") from error

    async def _prompt(self, job: Job, source: EngineSource) -> EnginePrompt:
        boundary = source.packed
        if self._packer is None or boundary is None:
            return EnginePrompt(job.tokens)
        packed = await self._packer.packed(_name(job, source), job.tokens[: boundary.end], self._metrics)
        if packed is None:
            return EnginePrompt(job.tokens)
        return EnginePrompt([*packed.placeholder_ids, *job.tokens[boundary.end :]], packed)

    def _refused(self, job: Job, source: EngineSource, prompt: EnginePrompt, error: EntryRefused) -> None:
        """The entry is checked at its next use, and packed once more if the engine's store has lost it."""
        assert self._packer is not None and prompt.packed is not None
        self._metrics.add("kvfold_pack_refusals_total")
        self._checked.pop(prompt.packed.entry, None)
        if error.is_lost:
            self._packer.forget(_name(job, source))

    async def _check(self, prompt: EnginePrompt, packed: PackedPrefix, salt: str, *, anew: bool) -> None:
        """`anew`: of a reply of one token the stream does not tell whether it was cut."""
        if not anew and self._checked.get(packed.entry, 0.0) > time.monotonic():
            return
        body = {**self._body(prompt, salt), "max_tokens": 1, "temperature": 0}
        answer = await self._http.json("POST", _PATH, body)
        try:
            packed.check(answer.get("kv_transfer_params"))
        except InputError as error:
            raise EntryRefused(str(error)) from error
        now = time.monotonic()
        self._checked = {name: until for name, until in self._checked.items() if until > now}
        self._checked[packed.entry] = now + _CHECKED_S

    async def _stream(self, job: Job, prompt: EnginePrompt, salt: str) -> None:
        body = {**self._body(prompt, salt), **_sampling(job), "stream": True, "stream_options": {"include_usage": True}}
        output = _Output(job, num_held=0 if prompt.packed is None or job.max_new_tokens == 1 else 1)
        async with aclosing(self._http.events(_PATH, body)) as events:
            async for event in events:
                output.add(event)
        if output.is_refused:
            raise EntryRefused
        output.end()

    def _body(self, prompt: EnginePrompt, salt: str) -> Json:
        found: Json = {"model": self._model, "prompt": list(prompt.token_ids)}
        found |= {"cache_salt": salt} if salt else {}
        return found | ({} if prompt.packed is None else {"kv_transfer_params": prompt.packed.kv_transfer_params})


def _name(job: Job, source: EngineSource) -> bytes:
    """Of a packed prefix: tenants share none."""
    assert source.packed is not None
    return job.tenant.encode() + b"|" + source.packed.digest


def _sampling(job: Job) -> Json:
    sampling = job.sampling
    found: Json = {"max_tokens": job.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p}
    found |= {"seed": sampling.seed} if job.has_seed else {}  # vLLM samples requests with seeds one by one
    found |= {"top_k": sampling.top_k} if sampling.top_k else {}
    found |= {"stop": list(job.stop)} if job.stop else {}
    return found | ({"ignore_eos": True} if job.ignores_eos else {})


class _Output:
    """Events of a stream as the job's; the first `num_held` texts are held back until another one follows."""

    def __init__(self, job: Job, num_held: int) -> None:
        self._job, self._num_held = job, num_held
        self._held: list[Event] = []
        self._num_texts = self._num_tokens = 0
        self._has_begun = False
        self._choice: dict[str, Any] = {}

    def add(self, event: Json) -> None:
        self._num_tokens = (event.get("usage") or {}).get("completion_tokens", self._num_tokens)
        for choice in event.get("choices", ()):
            self._num_texts += 1
            self._held += [TextDelta(choice["text"])] if choice.get("text") else []
            if choice.get("finish_reason"):
                self._choice = choice
            if self._num_texts > self._num_held and not self._choice:
                self._pass_on()

    @property
    def is_refused(self) -> bool:
        """Whether the reply was cut as a connector cuts those that it refuses."""
        is_cut = self._choice.get("finish_reason") == "length" and self._num_tokens <= 1
        return not self._has_begun and self._num_held > 0 and is_cut

    def _pass_on(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._job.source.began()
            self._job.listener(PrefillDone(0))
        for event in self._held:
            self._job.listener(event)
        self._held = []

    def end(self) -> None:
        self._pass_on()
        reason, stop = self._choice.get("finish_reason"), self._choice.get("stop_reason")
        if reason not in ("stop", "length"):
            raise ApiError(502, f"the engine ended a reply by {reason}")
        found = "length" if reason == "length" else "stop" if isinstance(stop, str) else "eos"
        self._job.end(Ended(found, self._num_tokens, stop if isinstance(stop, str) else None))  # type: ignore[arg-type]
