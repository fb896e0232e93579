"""What the two sides of the connector tell each other: the plan of a step, a worker's layout, what failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True)
class ChunkBlocks:
    """A chunk of a prompt and the engine's blocks for it; a load leaves the first `skip` of its blocks out, and those
    behind the last of `blocks`."""

    start: int
    end: int
    digest: str
    blocks: list[int]
    skip: int = 0


@dataclass(frozen=True)
class ChunkTransfer:
    """Chunks of one request to load or to store."""

    request_id: str
    tenant: str
    chunks: list[ChunkBlocks]


@dataclass(frozen=True)
class PackedTransfer:
    """Slots `start` and later of a packed prefix, into these blocks; `before`: blocks that have the earlier ones."""

    request_id: str
    entry: str
    start: int
    blocks: list[int]
    before: list[int]


@dataclass(frozen=True)
class RaggedUse:
    """A ragged document and its blocks."""

    entry: str
    blocks: list[int]


@dataclass
class StepPlan(KVConnectorMetadata):
    """What the workers do in one step."""

    loads: list[ChunkTransfer] = field(default_factory=list)
    stores: list[ChunkTransfer] = field(default_factory=list)
    packed: list[PackedTransfer] = field(default_factory=list)
    ragged: dict[int, RaggedUse] = field(default_factory=dict)  # by requests that run, by their first block


@dataclass
class WorkerLayout(KVConnectorHandshakeMetadata):
    """How a worker's blocks lie in memory; stored blocks of another layout would be misread."""

    layout: str
    packed_refusal: str | None
    ragged_refusal: str | None


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Packed prefixes that could not be loaded, by request: why; and digests of chunks that could not."""

    failed: dict[str, str] = field(default_factory=dict)
    bad_digests: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        return WorkerReport({**other.failed, **self.failed}, self.bad_digests | other.bad_digests)
