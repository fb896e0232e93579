"""Fused SDPA of one part on a GPU, with its log-sum-exp: the kernel that PyTorch would choose there.

On Hopper that is cuDNN's, elsewhere FlashAttention 2. Both read grouped queries without repeating keys. They differ in
what "causal" means when there are more slots than queries: FlashAttention aligns the mask at the bottom right, so one
call reads earlier chunks and the chunk itself; cuDNN's aligns at the top left, so the two are read apart and joined.

    H KV heads   Q query heads   T queries   S slots, the last T of which are the queries' own if causal   D head dim
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from kvfold.core import HAS_TRITON

# cuDNN builds a plan for each new shape, some 30 ms; a short query would not win that back.
_FEWEST_QUERIES = 1024


def sdpa(q_QTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [Q, T, D] and natural-log-sum-exp [Q, T]; `causal`: query t sees slots 0 .. S - T + t."""
    if not _prefers_cudnn(q_QTD, k_HSD, v_HSD, scale):
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            q_QTD.unsqueeze(0), k_HSD.unsqueeze(0), v_HSD.unsqueeze(0), 0.0, causal, scale=scale
        )
        return found[0][0], found[1][0]
    before = k_HSD.shape[1] - q_QTD.shape[1] if causal else 0
    own = _cudnn(q_QTD, k_HSD[:, before:], v_HSD[:, before:], scale, causal)
    if not before:
        return own
    return blend(*_cudnn(q_QTD, k_HSD[:, :before], v_HSD[:, :before], scale, False), *own)


def sdpa_with_bias(q_QTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, bias_HS: Tensor) -> tuple[Tensor, Tensor]:
    """The same with log-biases of slots, which these kernels do not take: they become two more channels.

    q' = [q, 1, 1] and k' = [k, b, r] with b the bias over the scale and r what rounding took from it, so that 16 bits
    of the bias count; kernels want a multiple of 8 channels.
    """
    head_dim, wide = q_QTD.shape[-1], -(-(q_QTD.shape[-1] + 2) // 8) * 8
    bias_HS = bias_HS.float() / scale
    high_HS = bias_HS.to(k_HSD.dtype)
    low_HS = (bias_HS - high_HS.float()).to(k_HSD.dtype)
    q, k, v = (functional.pad(x, (0, wide - head_dim)) for x in (q_QTD, k_HSD, v_HSD))
    q[..., head_dim : head_dim + 2] = 1.0
    k[..., head_dim], k[..., head_dim + 1] = high_HS, low_HS
    out, lse = sdpa(q, k, v, scale, False)
    return out[..., :head_dim], lse


def _prefers_cudnn(q_QTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> bool:
    if q_QTD.shape[1] < _FEWEST_QUERIES:
        return False
    choice = torch._fused_sdp_choice(
        q_QTD.unsqueeze(0), k_HSD.unsqueeze(0), v_HSD.unsqueeze(0), scale=scale, enable_gqa=True
    )
    return bool(choice == SDPBackend.CUDNN_ATTENTION.value)


def _cudnn(q_QTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_QTD.unsqueeze(0), k_HSD.unsqueeze(0), v_HSD.unsqueeze(0), None, True, 0.0, causal, scale=scale
    )
    return found[0][0], found[1][0].reshape(q_QTD.shape[:-1])


def blend(a_QTD: Tensor, a_lse_QT: Tensor, b_QTD: Tensor, b_lse_QT: Tensor) -> tuple[Tensor, Tensor]:
    """Two parts of attention as one, rounded once; the first part's memory is reused."""
    if HAS_TRITON:
        from kvfold.attend.kernels import blend as kernel

        return kernel.blend(a_QTD, a_lse_QT, b_QTD, b_lse_QT)
    return blend_reference(a_QTD, a_lse_QT, b_QTD, b_lse_QT)


def blend_reference(a_QTD: Tensor, a_lse_QT: Tensor, b_QTD: Tensor, b_lse_QT: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain operations."""
    share_QT = torch.sigmoid(b_lse_QT - a_lse_QT).nan_to_num(0.0)
    out_QTD = torch.lerp(a_QTD.float(), b_QTD.float(), share_QT.unsqueeze(-1)).to(a_QTD.dtype)
    return out_QTD, torch.logaddexp(a_lse_QT, b_lse_QT)
