"""vLLM's general plug-in of kvfold, run in every vLLM process: with KVFOLD_VLLM_RAGGED=1 it registers the attention
backends that read packed documents whose heads differ in length."""

from __future__ import annotations

import os

VARIABLE = "KVFOLD_VLLM_RAGGED"


def register() -> None:
    """Called by vLLM, perhaps several times. On CPUs vLLM takes no other backend than its own, so that one is replaced;
    on CUDA it is chosen with --attention-backend CUSTOM."""
    if os.environ.get(VARIABLE) != "1":
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "kvfold.vllm.ragged.RaggedBackend")
    register_backend(AttentionBackendEnum.CUSTOM, "kvfold.vllm.ragged_cuda.RaggedCudaBackend")
