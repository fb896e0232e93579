"""The ragged attention backend for CUDA: vLLM's Triton backend, and kvfold's kernels for ragged documents.

    KVFOLD_VLLM_RAGGED=1 vllm serve MODEL --attention-backend CUSTOM --kv-transfer-config …

Written against vLLM 0.32; the kernels run on a GPU in tests, the backend as a whole has not been run. Steps are not
captured in CUDA graphs: requests on documents come and go, and their tables with them.
"""

from __future__ import annotations

from typing import ClassVar

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from kvfold.vllm.ragged_forward import RaggedForward


class RaggedCudaBuilder(TritonAttentionMetadataBuilder):
    """Metadata as vLLM makes them, never for a captured graph."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER


class RaggedCudaImpl(RaggedForward, TritonAttentionImpl):
    """vLLM's Triton attention, and kvfold's for ragged documents."""


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
