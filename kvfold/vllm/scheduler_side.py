"""The connector in vLLM's scheduler: which stored blocks a request can begin with, and what workers load and store.

Chunks are entries of whole blocks, named by a hash chain over the prompt's tokens (`kvfold.store.key`), so the longest
stored beginning of a prompt is the longest run of names that are there. All loads are asynchronous: no forward runs on
blocks before they are checked, and what fails is computed without a wasted pass. Chunks are stored as their last token
is computed, also in chunked prefills, and also behind a part that was loaded.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvfold.store.key import Key, chunk_keys
from kvfold.vllm.engine_facts import EngineFacts
from kvfold.vllm.messages import (
    ChunkBlocks,
    ChunkTransfer,
    PackedTransfer,
    RaggedUse,
    StepPlan,
    WorkerLayout,
    WorkerReport,
)
from kvfold.vllm.packed_requests import PackedRequests
from kvfold.vllm.shared_store import SharedStore
from kvfold.vllm.stats import FoldStats

_FORGET_S = 60.0  # a chunk that was given to a worker is looked for again after this time
_MOST_RECENT = 1 << 14


class Recent:
    """Digests of the last minute: given to workers to store, or found bad."""

    def __init__(self) -> None:
        self._at: OrderedDict[str, float] = OrderedDict()

    def add(self, digest: str) -> None:
        self._at[digest] = time.monotonic()
        self._at.move_to_end(digest)
        if len(self._at) > _MOST_RECENT:
            self._at.popitem(last=False)

    def discard(self, digest: str) -> None:
        self._at.pop(digest, None)

    def __contains__(self, digest: str) -> bool:
        return time.monotonic() - self._at.get(digest, -_FORGET_S) < _FORGET_S


@dataclass
class Prompt:
    """An ordinary request: its chunks, and how far it has come."""

    request: Any
    tenant: str
    keys: list[Key]
    local_len: int = 0  # tokens that vLLM had itself when it last asked
    blocks: list[int] = field(default_factory=list)
    num_stored: int = 0  # chunks that were looked at


class SchedulerSide:
    def __init__(self, facts: EngineFacts, store: SharedStore, *, loads: bool, stores: bool) -> None:
        self._facts = facts
        self._store = store
        self._can_load, self._can_store = loads, stores
        self._layouts: list[str] = []
        self._packed = PackedRequests(facts, store)
        self._requests: dict[str, Any] = {}  # for packed prefixes
        self._local_lens: dict[str, int] = {}
        self._prompts: dict[str, Prompt] = {}
        self._plan = StepPlan()
        self._given, self._bad = Recent(), Recent()
        self.stats = FoldStats()

    def set_layouts(self, layouts: Sequence[WorkerLayout]) -> None:
        """Of all workers, by rank."""
        self._layouts = [one.layout for one in layouts]
        refusals = [one.packed_refusal for one in layouts if one.packed_refusal is not None]
        self._packed.engine_refusal = self._facts.packed_refusal or next(iter(refusals), None)
        self._packed.ragged_refusal = next((one.ragged_refusal for one in layouts if one.ragged_refusal), None)

    # Requests

    def arrive(self, request: Any) -> None:
        name = request.request_id
        if self._packed.arrive(request):
            self._requests[name] = request
            if self._packed.use(name) is None:
                self.stats.add("packed_refusals")
        elif request.prompt_token_ids and not request.mm_features and not _is_foreign(request):
            tenant = request.cache_salt or ""
            size = self._facts.chunks.chunk_len
            keys = chunk_keys(self._facts.binding(tenant).scope, request.prompt_token_ids, size)
            self._prompts[name] = Prompt(request, tenant, keys)

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """What goes back to the client."""
        self._prompts.pop(request_id, None)
        self._requests.pop(request_id, None)
        self._local_lens.pop(request_id, None)
        return self._packed.finish(request_id)

    def matched_tokens(self, request: Any, local_len: int) -> int:
        """Tokens behind the first `local_len` that can be loaded."""
        name = request.request_id
        self._local_lens[name] = local_len
        use = self._packed.use(name)
        if use is not None:
            return max(0, use.num_slots - local_len)
        prompt = self._prompts.get(name)
        if prompt is None or not self._can_load:
            return 0
        size = self._facts.block_size
        most: int = (request.num_tokens - 1) // size * size
        return max(0, min(self._stored_len(prompt), most) - local_len)

    def _stored_len(self, prompt: Prompt) -> int:
        """Tokens of the longest stored beginning; all workers have to have their part of it."""
        good = next((i for i, key in enumerate(prompt.keys) if key.digest in self._bad), len(prompt.keys))
        found = good
        for rank in range(len(self._layouts)):
            found = min(found, self._store.num_leading(self._keys(prompt, rank)[:found]))
        return found * self._facts.chunks.chunk_len if self._layouts else 0

    def _keys(self, prompt: Prompt, rank: int) -> list[Key]:
        scope = self._facts.binding(prompt.tenant, self._layouts[rank]).scope
        return [key._replace(scope=scope) for key in prompt.keys]

    def allocated(self, request: Any, blocks: Sequence[int], num_external: int) -> None:
        """Blocks of a request are there; the last `num_external` of its known tokens are to be loaded."""
        if not num_external:
            return
        name = request.request_id
        start = self._local_lens[name]
        end, size = start + num_external, self._facts.block_size
        use = self._packed.use(name)
        if use is not None:
            before, mine = list(blocks[: start // size]), list(blocks[start // size : end // size])
            self._plan.packed.append(PackedTransfer(name, use.entry, start, mine, before))
            return
        prompt = self._prompts[name]
        wanted = [key for key in prompt.keys if key.end > start and key.start < end]
        chunks = [self._part(key, blocks, start, end) for key in wanted]
        self._plan.loads.append(ChunkTransfer(name, prompt.tenant, chunks))

    def _part(self, key: Key, blocks: Sequence[int], start: int, end: int) -> ChunkBlocks:
        """What a load of tokens start … end takes of a chunk."""
        size = self._facts.block_size
        first, last = max(start, key.start), min(end, key.end)
        mine = list(blocks[first // size : last // size])
        return ChunkBlocks(key.start, key.end, key.digest, mine, (first - key.start) // size)

    # Steps

    def plan_step(self, output: Any) -> StepPlan:
        plan, self._plan = self._plan, StepPlan()
        for new in output.scheduled_new_reqs:
            after = new.num_computed_tokens + output.num_scheduled_tokens[new.req_id]
            self._scheduled(plan, new.req_id, new.num_computed_tokens, after, new.block_ids, is_new=True)
        cached = output.scheduled_cached_reqs
        columns = (cached.req_ids, cached.num_computed_tokens, cached.new_block_ids)
        for name, computed, blocks in zip(*columns, strict=True):
            after = computed + output.num_scheduled_tokens[name]
            self._scheduled(plan, name, computed, after, blocks, is_new=name in cached.resumed_req_ids)
        return plan

    def _scheduled(
        self, plan: StepPlan, name: str, computed: int, after: int, blocks: tuple[list[int], ...] | None, is_new: bool
    ) -> None:
        """A request runs its tokens computed … after in this step; `blocks` are all of them if it `is_new`."""
        use = self._packed.use(name)
        if use is not None and is_new:
            use.is_served = computed >= use.num_slots
            use.blocks = blocks[0][: use.num_slots // self._facts.block_size] if blocks else []
        if use is not None and use.is_ragged and use.is_served:
            plan.ragged[use.blocks[0]] = RaggedUse(use.entry, use.blocks)
        prompt = self._prompts.get(name)
        if prompt is None or not self._can_store:
            return
        if is_new:
            prompt.blocks = []
        if blocks is not None:
            prompt.blocks += blocks[0]
        chunks = []
        while prompt.num_stored < len(prompt.keys) and prompt.keys[prompt.num_stored].end <= after:
            key = prompt.keys[prompt.num_stored]
            prompt.num_stored += 1
            if not self._is_stored(prompt, key):
                self._given.add(key.digest)
                chunks.append(self._part(key, prompt.blocks, key.start, key.end))
        if chunks:
            plan.stores.append(ChunkTransfer(name, prompt.tenant, chunks))

    def _is_stored(self, prompt: Prompt, key: Key) -> bool:
        """Or on its way, given to the workers and not seen yet."""
        bindings = [self._facts.binding(prompt.tenant, layout) for layout in self._layouts]
        if all(self._store.has(key._replace(scope=binding.scope)) for binding in bindings):
            self._given.discard(key.digest)
            return True
        return key.digest in self._given

    def reported(self, report: WorkerReport) -> None:
        """What workers could not load."""
        for digest in report.bad_digests:
            self._bad.add(digest)
            self._given.discard(digest)  # it is stored again by the request that computes it
        for name, reason in report.failed.items():
            request = self._requests.get(name)
            if request is not None and self._packed.use(name) is not None:
                self._packed.refuse(request, reason)
                self.stats.add("packed_refusals")


def _is_foreign(request: Any) -> bool:
    """Whether its KV depends on more than token ids and weights: a LoRA adapter can change under its name."""
    return request.lora_request is not None or request.prompt_embeds is not None
