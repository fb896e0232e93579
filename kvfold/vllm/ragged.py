"""Attention backends of vLLM that also read packed documents whose heads differ in length (experimental).

vLLM's own kernel runs over all requests; what it computes for those that read such a document is overwritten
(`kvfold.vllm.ragged_documents`). This one is for CPUs, `kvfold.vllm.ragged_cuda` for CUDA.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from kvfold.vllm.ragged_forward import RaggedForward
from kvfold.vllm.row_reader import RowReader


class RaggedImpl(RaggedForward, CPUAttentionBackendImpl):
    """vLLM's CPU attention, and kvfold's for ragged documents."""

    _reader: RowReader | None = None

    def own_rows(self, layer: Any, cache_BHNC: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
        if self._reader is None:
            self._reader = RowReader(layer, cache_BHNC)
        return self._reader.read(cache_BHNC[blocks])


class RaggedBackend(CPUAttentionBackend):
    """Under the name of vLLM's own."""

    @staticmethod
    def get_impl_cls() -> type[RaggedImpl]:
        return RaggedImpl
