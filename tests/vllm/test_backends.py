"""The attention backends that the plug-in registers, as far as a machine without a GPU can make them."""

from __future__ import annotations

import pytest
import torch

from kvfold.vllm.plugin import register
from kvfold.vllm.ragged_documents import RaggedAttention


def test_backends_are_registered_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    monkeypatch.delenv("KVFOLD_VLLM_RAGGED", raising=False)
    register()
    assert AttentionBackendEnum.CPU_ATTN.get_path().startswith("vllm.")
    monkeypatch.setenv("KVFOLD_VLLM_RAGGED", "1")
    register()
    register()
    for name in (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
        backend = name.get_class()
        assert backend.__module__.startswith("kvfold.vllm.") and AttentionBackendEnum[backend.get_name()] is name
        assert issubclass(backend.get_impl_cls(), RaggedAttention)
        assert not backend.forward_includes_kv_cache_update, "rows are written from outside"
    assert AttentionBackendEnum.CUSTOM.get_class().get_builder_cls()._cudagraph_support is AttentionCGSupport.NEVER


def test_the_cuda_implementation_reads_rows_of_its_blocks() -> None:
    from kvfold.vllm.ragged_cuda import RaggedCudaImpl

    impl = RaggedCudaImpl(4, 64, 0.125, 2, None, None, "auto")
    assert (impl.num_kv_heads, impl.head_size, impl.scale) == (2, 64, 0.125)
    cache_BHNC = torch.arange(3 * 2 * 16 * 128).view(3, 2, 16, 128)
    k_KHD, v_KHD = impl.own_rows(None, cache_BHNC, torch.tensor([2, 0]))
    assert k_KHD[17, 1].equal(cache_BHNC[0, 1, 1, :64]) and v_KHD[3, 0].equal(cache_BHNC[2, 0, 3, 64:])
