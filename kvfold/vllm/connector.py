"""`FoldConnector`, the class that vLLM makes once for its scheduler and once in every worker; the work is done by the
`SchedulerSide` and the `WorkerSide`.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "FoldConnector", "kv_connector_module_path": "kvfold.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "/var/kvfold"}}'
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvfold.store.entry.format import read_secret
from kvfold.vllm.engine_facts import EngineFacts
from kvfold.vllm.messages import StepPlan, WorkerLayout, WorkerReport
from kvfold.vllm.scheduler_side import SchedulerSide
from kvfold.vllm.settings import Settings
from kvfold.vllm.shared_store import SharedStore
from kvfold.vllm.stats import FoldMetrics, FoldStats
from kvfold.vllm.worker_side import Rank, WorkerSide


class FoldConnector(KVConnectorBase_V1):
    """Prefixes of prompts, and packed prefixes, from a store that many vLLM processes share."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings.parse(transfer.kv_connector_extra_config)
        secret = read_secret(settings.secret_file or None)
        facts = EngineFacts.read(vllm_config, kv_cache_config, settings, secret)
        self._store = SharedStore(settings, secret)
        self._num_blocks = kv_cache_config.num_blocks
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                facts, self._store, loads=transfer.is_kv_consumer, stores=transfer.is_kv_producer
            )
        else:
            layers = vllm_config.compilation_config.static_forward_context
            self._worker = WorkerSide(facts, self._store, _rank(vllm_config), layers)

    @property
    def requires_kv_delivery(self) -> bool:
        """A chunk that is not stored is a miss later."""
        return False

    # In the scheduler

    @property
    def _planner(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        found = [metadata[rank] for rank in sorted(metadata)]
        self._planner.set_layouts([one for one in found if isinstance(one, WorkerLayout)])

    def on_new_request(self, request: Any) -> None:
        self._planner.arrive(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        found = self._planner.matched_tokens(request, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self._planner.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._planner.reported(report)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self._planner.finish(request.request_id)

    # In a worker

    @property
    def _copier(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        found = self._get_connector_metadata()
        assert isinstance(found, StepPlan)
        return found

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self._copier.register(kv_caches, self._num_blocks)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._copier.start_step(self._plan)

    def get_handshake_metadata(self) -> WorkerLayout:
        return self._copier.layout

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._copier.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are done when a request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are copied when all layers are computed."""

    def wait_for_save(self) -> None:
        self._copier.store(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._copier.take_received()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._copier.take_bad_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self._copier.take_report()

    # In both

    def get_kv_connector_stats(self) -> FoldStats | None:
        return self._planner.stats.take() if self._scheduler is not None else self._copier.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> FoldStats:
        return FoldStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> FoldMetrics:
        return FoldMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        self._store.close()


def _rank(vllm_config: Any) -> Rank:
    parallel = vllm_config.parallel_config
    return Rank(
        tensor=get_tensor_model_parallel_rank(),
        tensor_size=parallel.tensor_parallel_size,
        pipeline=get_pp_group().rank_in_group,
        total_kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
    )
