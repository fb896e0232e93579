"""Engines that the connector refuses by name, told from vLLM's real configuration, without starting it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold.errors import InputError
from tests.vllm.engine import save_tiny, transfer

pytest.importorskip("vllm", reason="vLLM is not installed here; docs/vllm.md tells how to run these tests")

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvfold.vllm.engine_facts import EngineFacts
from kvfold.vllm.settings import Settings

SHAPE = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def cache_config(*specs: Any) -> Any:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


def facts(model: Path, store: Path, specs: list[Any] | None = None, **options: Any) -> EngineFacts:
    given = {**transfer(store), **options.pop("transfer", {})}
    args = EngineArgs(
        model=str(model), dtype="float32", enforce_eager=True, kv_transfer_config=KVTransferConfig(**given), **options
    )
    found = cache_config(*(specs or [FullAttentionSpec(**SHAPE)]))
    return EngineFacts.read(args.create_engine_config(), found, Settings(store=str(store)), b"")


def test_a_plain_engine_can_do_all(model: Path, tmp_path: Path) -> None:
    found = facts(model, tmp_path)
    assert found.packed_refusal is None and found.block_size == 128 and found.chunks.chunk_len == 128
    assert found.binding("a").scope != found.binding("b").scope != found.binding("b", "layout").scope


def test_engines_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match='set "kv_load_failure_policy": "recompute"'):
        facts(model, tmp_path, transfer={"kv_load_failure_policy": "fail"})
    with pytest.raises(InputError, match="load_format dummy"):
        facts(model, tmp_path, load_format="dummy")
    with pytest.raises(InputError, match="this model has SlidingWindowSpec"):
        facts(model, tmp_path, [SlidingWindowSpec(**SHAPE, sliding_window=64)])
    with pytest.raises(InputError, match="--disable-hybrid-kv-cache-manager"):
        facts(model, tmp_path, [FullAttentionSpec(**SHAPE), FullAttentionSpec(**SHAPE)])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "length-dependent"),
        ({"alibi": True}, "ALiBi"),
    ],
)
def test_packed_documents_are_refused_by_model(
    change: dict[str, Any], reason: str, model: Path, tmp_path: Path
) -> None:
    found = facts(model, tmp_path, hf_overrides=change)
    assert found.packed_refusal is not None and reason in found.packed_refusal


def test_windows_refuse_packed_documents_alone(model: Path, tmp_path: Path) -> None:
    found = facts(model, tmp_path, [FullAttentionSpec(**SHAPE, sliding_window=64)])
    assert found.packed_refusal is not None and "sliding-window" in found.packed_refusal


def test_other_positions_are_another_binding(model: Path, tmp_path: Path) -> None:
    scaled = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}}
    plain, yarn = facts(model, tmp_path), facts(model, tmp_path, hf_overrides=scaled)
    assert yarn.packed_refusal is None and yarn.binding("").scope != plain.binding("").scope
    entry = {"weights": plain.chunks.weights, "dtype": "torch.float32", "rope": plain.chunks.rope}
    assert plain.packed_mismatch(entry) is None
    mismatch = yarn.packed_mismatch(entry)
    assert mismatch is not None and "other rotary positions" in mismatch
