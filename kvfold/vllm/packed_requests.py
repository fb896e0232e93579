"""Requests that ask for a packed prefix: which entry, whether it can be served, and what the client is told.

vLLM has no way for a connector to refuse one request. A refused one is cut to one token, hashed apart, so that blocks
computed from placeholders never serve another request, and told why in `kv_transfer_params` of its answer; one that
was served is told the entry. A client that finds neither was not served (`PackedPrefix.check`).
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvfold.packed.client import ENTRY, ERROR, PACK_AGAIN, SLOTS, TOKENS
from kvfold.packed.entry import PackedReader
from kvfold.packed.placeholders import is_marked, placeholder_ids
from kvfold.packed.ragged import RaggedFormat
from kvfold.store.entry.format import InvalidEntry
from kvfold.store.key import Key
from kvfold.vllm.engine_facts import EngineFacts
from kvfold.vllm.shared_store import SharedStore


@dataclass
class PackedUse:
    """A request over an entry; `is_served` once its own tokens were scheduled behind all of the slots."""

    entry: str
    num_slots: int
    num_tokens: int
    is_ragged: bool = False
    is_served: bool = False
    blocks: list[int] = field(default_factory=list)  # that hold the slots


class EntryHead(NamedTuple):
    """What the scheduler has to know of an entry, which it reads at most every _KNOWN_S seconds: it can be large, and
    the worker checks what it loads."""

    num_slots: int
    num_tokens: int
    vocab_size: int
    ragged_size: int  # tokens of a block that a ragged entry is laid out for, or 0
    read_at: float

    @property
    def is_ragged(self) -> bool:
        return self.ragged_size > 0


_KNOWN_S = 10.0
_MOST_KNOWN = 1 << 10


class Refused(Exception):
    """Why a request for a packed prefix is not served."""


class PackedRequests:
    """Those that the scheduler knows."""

    def __init__(self, facts: EngineFacts, store: SharedStore) -> None:
        self._facts = facts
        self._store = store
        self.engine_refusal = facts.packed_refusal
        self.ragged_refusal: str | None = None
        self._known: OrderedDict[Key, EntryHead] = OrderedDict()
        self._uses: dict[str, PackedUse] = {}
        self._refusals: dict[str, str] = {}

    def arrive(self, request: Any) -> bool:
        """Whether a new request is one for a packed prefix; one that is refused is changed as told above."""
        params = request.kv_transfer_params if isinstance(request.kv_transfer_params, dict) else {}
        ids = request.prompt_token_ids or []
        if ENTRY not in params and not is_marked(ids):
            return False
        try:
            self._uses[request.request_id] = self._use(request, params, ids)
        except Refused as refused:
            self.refuse(request, str(refused))
        return True

    def refuse(self, request: Any, reason: str) -> None:
        use = self._uses.pop(request.request_id, None)
        if use is not None:
            self._known.clear()  # one of them could not be loaded
        self._refusals[request.request_id] = reason
        request.max_tokens = 1
        request.cache_salt = f"kvfold refused {uuid.uuid4()}"
        request.block_hashes.clear()
        request.update_block_hashes()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._uses or request_id in self._refusals

    def use(self, request_id: str) -> PackedUse | None:
        return self._uses.get(request_id)

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """What the client is told; None of other requests."""
        refusal, use = self._refusals.pop(request_id, None), self._uses.pop(request_id, None)
        if refusal is not None:
            return {ERROR: refusal}
        if use is None:
            return None
        if not use.is_served:
            return {ERROR: f"entry {use.entry} was not loaded before the request ended"}
        return {ENTRY: use.entry, SLOTS: use.num_slots, TOKENS: use.num_tokens}

    def _use(self, request: Any, params: dict[str, Any], ids: list[int]) -> PackedUse:
        for reason in _request_reasons(request):
            raise Refused(reason)
        if self.engine_refusal is not None:
            raise Refused(self.engine_refusal)
        if ENTRY not in params:
            raise Refused(f"the prompt has placeholder ids and names no entry; send kv_transfer_params with {ENTRY}")
        key = Key.parse(params[ENTRY]) if isinstance(params[ENTRY], str) else None
        if key is None or key.start != 0:
            raise Refused(f"{ENTRY} is no name of an entry; send the one that kvfold pack printed")
        entry = self._read(key)
        num_slots = entry.num_slots
        if entry.is_ragged and self.ragged_refusal is not None:
            raise Refused(self.ragged_refusal)
        size = self._facts.block_size
        if entry.is_ragged and entry.ragged_size != size:
            made = entry.ragged_size
            raise Refused(f"the entry is laid out for blocks of {made}, not {size}; pack it with --block-size {size}")
        if params.get(SLOTS, num_slots) != num_slots:
            raise Refused(f"{SLOTS} is {params[SLOTS]}, and the entry has {num_slots}")
        if num_slots % size:
            raise Refused(f"the entry has {num_slots} slots, no whole blocks; pack it with --block-size {size}")
        if ids[:num_slots] != placeholder_ids(key.text, num_slots, entry.vocab_size):
            raise Refused("the prompt does not begin with the entry's placeholder ids; PackedPrefix gives them")
        if len(ids) == num_slots:
            raise Refused("the prompt has nothing behind the placeholder ids; add the question")
        return PackedUse(key.text, num_slots, entry.num_tokens, entry.is_ragged)

    def _read(self, key: Key) -> EntryHead:
        """The head of an entry that fits the engine."""
        known = self._known.get(key)
        if known is not None and time.monotonic() - known.read_at < _KNOWN_S:
            return known
        copy = self._store.open(key)
        if copy is None:
            raise Refused(f"there is no entry {key.text} in the store; {PACK_AGAIN}")
        with copy.file as file:
            try:
                entry = PackedReader(file, key, secret=self._store.secret)
                ragged_size = RaggedFormat.parse(entry.facts["pages"]).block_size if entry.is_ragged else 0
            except InvalidEntry as error:
                self._store.drop(copy, error)
                raise Refused(f"the entry is damaged ({error.reason}); {PACK_AGAIN}") from error
        mismatch = self._facts.packed_mismatch(entry.facts)
        if mismatch is not None:
            raise Refused(f"the entry does not fit: {mismatch}")
        head = EntryHead(entry.num_slots, entry.num_tokens, entry.vocab_size, ragged_size, time.monotonic())
        self._known[key] = head
        self._known.move_to_end(key)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return head


def _request_reasons(request: Any) -> Iterator[str]:
    """What would read the placeholder ids, or weights that the entry was not made with."""
    sampling = request.sampling_params
    if sampling is None:
        yield "a packed prefix answers questions; pooling is not supported"
        return
    if sampling.prompt_logprobs is not None:
        yield "prompt_logprobs would be those of placeholder ids; leave it out"
    if sampling.repetition_penalty != 1.0:
        yield "repetition_penalty counts placeholder ids; use frequency_penalty or presence_penalty"
    if request.lora_request is not None:
        yield "the entry was made without a LoRA adapter; leave the adapter out"
    if request.mm_features or request.prompt_embeds is not None:
        yield "a packed prefix takes token ids; leave images and embeddings out"
