"""The ragged attention backend for CUDA: vLLM's Triton backend, and kvfold's kernels for ragged documents.

    KVFOLD_VLLM_RAGGED=1 vllm serve MODEL --attention-backend CUSTOM --kv-transfer-config …

Written against vLLM 0.32; the kernels run on a GPU in tests, the backend as a whole has not been run. Steps are not
captured in CUDA graphs: requests on documents come and go, and their tables with them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from kvfold.vllm.ragged_documents import RaggedAttention


class RaggedCudaBuilder(TritonAttentionMetadataBuilder):
    """Metadata as vLLM makes them, never for a captured graph."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class RaggedCudaImpl(RaggedAttention, TritonAttentionImpl):
    """vLLM's Triton attention, and kvfold's for ragged documents."""

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        *scales: Any,
        **more: Any,
    ) -> Tensor:
        found: Tensor = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales, **more)
        if attn_metadata is not None:
            self.attend_ragged(layer, extract_layer_index(layer.layer_name), query, kv_cache, attn_metadata, output)
        return found


class RaggedCudaBackend(TritonAttentionBackend):
    """vLLM finds it under CUSTOM."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RaggedCudaImpl]:
        return RaggedCudaImpl

    @staticmethod
    def get_builder_cls() -> type[RaggedCudaBuilder]:
        return RaggedCudaBuilder
