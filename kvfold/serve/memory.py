"""Memory of requests that name their user: recalled facts go behind the last message, what the user said is kept.

The section of facts follows the user's last text, behind every cache marker, and is not cached: the prefix before it is
that of a request without memory, so hits stay. A tenant's users are told apart by both names. A memory that fails costs
a request its facts and nothing else; the log says why.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock

from kvfold.errors import KvfoldError
from kvfold.memory.embedding import fact_embedder
from kvfold.memory.extract import fact_spans
from kvfold.memory.fact import MAX_NAME, Owner, name_fault
from kvfold.memory.memory import Memory
from kvfold.memory.recall import Recalled
from kvfold.memory.render import render
from kvfold.memory.store import FactStore
from kvfold.serve.api.errors import bad_request
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.ops.metrics import Metrics

MAX_TURN_CHARS = 4000  # a longer text of a user is a document, not what he says of himself
MAX_TURN_FACTS = 32
MAX_SECTION_CHARS = 4000
MAX_WAITING = 1000  # turns that wait to be written
_MAX_OWNERS = 256  # whose facts are held in memory
_READ_S = 5.0  # to wait for an earlier turn of the same user that is being written
_log = logging.getLogger("kvfold.serve")


class RequestMemory:
    """Used by any thread. Turns are written by one thread of its own, in their order."""

    def __init__(self, path: Path, metrics: Metrics, embedder: str = "auto") -> None:
        self._store, self._embedder, self._metrics = FactStore(path), fact_embedder(embedder), metrics
        self._lock = Lock()
        self._memories: OrderedDict[Owner, Memory] = OrderedDict()
        self._writes: dict[Owner, Future[None]] = {}  # the last one of each owner
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvfold-memory")

    def close(self) -> None:
        """Write what waits."""
        self._writer.shutdown()
        self._store.close()

    def with_facts(self, request: ChatRequest, tenant: str, now: float) -> ChatRequest:
        """The request with a section of facts behind the user's last text; as it is where none is near."""
        question, owner = _last_text(request), self._owner(request, tenant)
        if owner is None or not question:
            return request
        section = ""
        with self._failing_softly():
            if (write := self._writes.get(owner)) is not None:
                write.result(_READ_S)
            section = _section(self._memory(owner).recall(question, now=now))
        if not section:
            return request
        block = Block("memory", "user", section, request.blocks[-1].message)
        return replace(request, blocks=[*request.blocks, block])

    def count_request(self, request: ChatRequest, tenant: str) -> None:
        """Count a request that is served, by whether facts stand in its prompt."""
        has_facts = bool(request.blocks) and request.blocks[-1].kind == "memory"
        if has_facts or (_last_text(request) and self._owner(request, tenant)):
            self._metrics.add("kvfold_memory_requests_total", result="recalled" if has_facts else "none")

    def write_later(self, request: ChatRequest, tenant: str, now: float) -> None:
        """Keep the facts of the user's last text."""
        said, owner = _last_text(request), self._owner(request, tenant)
        if owner is None or not said or len(said) > MAX_TURN_CHARS:
            return
        with self._lock:
            self._writes = {who: write for who, write in self._writes.items() if not write.done()}
            if len(self._writes) < MAX_WAITING:
                self._writes[owner] = self._writer.submit(self._write, owner, said, now)
                return
        self._metrics.add("kvfold_memory_errors_total")

    def _write(self, owner: Owner, said: str, now: float) -> None:
        with self._failing_softly():
            if len(fact_spans(said)) <= MAX_TURN_FACTS:
                written = self._memory(owner).add(said, source="serve", at=now)
                self._metrics.add("kvfold_memory_facts_written_total", len(written))

    def _owner(self, request: ChatRequest, tenant: str) -> Owner | None:
        if not request.user.strip():
            return None
        if fault := name_fault(request.user):
            raise bad_request(
                f"{request.user_field}: {fault}; facts are kept by a name of at most {MAX_NAME} characters"
            )
        return Owner(tenant, request.user)

    def _memory(self, owner: Owner) -> Memory:
        with self._lock:
            if owner not in self._memories:
                self._memories[owner] = Memory(
                    None, owner.user, tenant=owner.tenant, embedder=self._embedder, store=self._store
                )
            self._memories.move_to_end(owner)
            while len(self._memories) > _MAX_OWNERS:
                self._memories.popitem(last=False)
            return self._memories[owner]

    @contextmanager
    def _failing_softly(self) -> Iterator[None]:
        try:
            yield
        except KvfoldError as error:
            _log.error("memory failed", extra={"facts": {"reason": str(error)}})
            self._metrics.add("kvfold_memory_errors_total")
        except Exception as error:
            _log.error("memory failed", exc_info=error)
            self._metrics.add("kvfold_memory_errors_total")


def _last_text(request: ChatRequest) -> str:
    """What the user says at the end of the messages; empty behind tool results, and for prompts without messages."""
    is_raw = request.raw_text is not None or request.raw_ids is not None
    if is_raw or not request.blocks or request.blocks[-1].kind != "text":
        return ""
    last = request.blocks[-1]
    if last.role != "user":
        return ""
    return "\n".join(block.text for block in request.blocks if block.message == last.message and block.kind == "text")


def _section(found: list[Recalled]) -> str:
    """The best facts that fit."""
    while found:
        section = render(one.fact for one in found)
        if len(section) <= MAX_SECTION_CHARS:
            return section
        found = found[:-1]
    return ""
