"""KV events as vLLM 0.32 encodes them: msgpack of these structs, whose names, fields and order are vLLM's.

A batch is an array, an event a map with its type, and fields that have their default are left out. Fields of vLLM that
kvfold never sets (group_idx, locality, session_id and others) have defaults there, and so are not on the wire.
"""

from __future__ import annotations

import msgspec

MEDIUM_GPU, MEDIUM_CPU, MEDIUM_STORAGE = "GPU", "CPU", "STORAGE"
ExtraKeys = tuple[str, ...]


class KvEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of all events."""


class BlockStored(KvEvent):
    """Consecutive blocks behind `parent_block_hash`, which is None for the beginning of a prompt; `token_ids` of all of
    them, `extra_keys` of each."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[ExtraKeys] | None = None


class BlockRemoved(KvEvent):
    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(KvEvent):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """`ts`: seconds since 1970; `data_parallel_rank`: the replica's number."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None
