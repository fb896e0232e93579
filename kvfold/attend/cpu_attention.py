"""Which compiled kernel reads many queries on a CPU with AVX-512: by panels of fp32, or by AMX tiles of bf16."""

from __future__ import annotations

from kvfold.attend.panel_call import PanelCall
from kvfold.core import has_amx_kernels


def cpu_attention(head_dim: int, is_bf16: bool) -> PanelCall:
    """The kernel for such heads on a CPU with AVX-512. `is_bf16`: it may round queries, keys and values to bf16."""
    if is_bf16 and has_amx_kernels():
        from kvfold.attend import amx_attention

        if amx_attention.CALL.reads_head_dim(head_dim):
            return amx_attention.CALL
    from kvfold.attend import avx512_attention

    return avx512_attention.CALL
