"""Counters of the connector, for vLLM's log line "KV Transfer metrics" and its Prometheus endpoint."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "loaded_tokens": "Prompt tokens whose KV was loaded from the store.",
    "loaded_bytes": "Bytes read from the store.",
    "load_seconds": "Seconds spent on loads.",
    "failed_loads": "Loads that failed a check or found no entry; their tokens were computed.",
    "stored_tokens": "Prompt tokens handed to the store.",
    "stored_bytes": "Bytes handed to the store.",
    "failed_stores": "Writes of chunks that failed, in a tier of the store or for lack of room in its queue.",
    "packed_loads": "Packed prefixes loaded.",
    "packed_refusals": "Requests for a packed prefix that were refused.",
}


class FoldStats(KVConnectorStats):
    """Sums since the last step."""

    data: dict[str, Any]

    def add(self, name: str, amount: float = 1) -> None:
        assert name in COUNTERS
        self.data[name] = self.data.get(name, 0) + amount

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> FoldStats:
        names = {*self.data, *other.data}
        return FoldStats(data={name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        return not self.data

    def take(self) -> FoldStats | None:
        """What was counted since the last call."""
        if self.is_empty():
            return None
        found = FoldStats(data=self.data)
        self.reset()
        return found


class FoldMetrics(KVConnectorPromMetrics):
    """A Prometheus counter `vllm:kvfold_<name>` for each of COUNTERS."""

    def __init__(self, config: Any, types: Any, labels: list[str], values: dict[int, list[object]]) -> None:
        super().__init__(config, types, labels, values)
        self._counters: dict[tuple[int, str], Any] = {}
        for name, text in COUNTERS.items():
            counter = self._counter_cls(name=f"vllm:kvfold_{name}", documentation=text, labelnames=labels)
            for engine, of in values.items():
                self._counters[engine, name] = counter.labels(*of)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counters[engine_idx, name].inc(amount)
