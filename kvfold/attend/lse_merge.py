"""Attention in parts, merged exactly by log-sum-exp (FlashDecoding's split-KV, done over storage).

So paged KV of several codecs, the open block and the tokens of the current chunk are attended to without being
concatenated.

A part on a GPU is read by the fused SDPA kernel that PyTorch would choose there: on Hopper cuDNN's, elsewhere
FlashAttention 2. Both read grouped queries without repeating keys. They differ in what "causal" means when there are
more slots than queries: FlashAttention aligns the mask at the bottom right, so one call reads earlier chunks and the
chunk itself; cuDNN's aligns at the top left, so the two are read apart and joined.

    H KV heads   G query heads per KV head   Q query heads   T queries   D head dim
    S slots, the last T of which are the queries' own if causal
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from kvfold.attend.cpu_attention import cpu_attention
from kvfold.attend.panel_call import PanelCall
from kvfold.core import HAS_AVX512_KERNELS, HAS_TRITON

# cuDNN builds a plan for each new shape, some 30 ms; a short query would not win that back.
_FEWEST_QUERIES = 1024
_CPU_TRIANGLE = 128  # queries of a causal call on a CPU
_FEWEST_LANES = 16  # queries of a KV head that a CPU's kernel reads together


def compute_dtype(q: Tensor) -> torch.dtype:
    """CPUs get fp32: few of them have 16-bit arithmetic, and where it is missing it is emulated at a fiftieth."""
    return torch.float32 if q.device.type == "cpu" else q.dtype


def attend(
    q_HGTD: Tensor,
    k_HSD: Tensor,
    v_HSD: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask_TS: Tensor | None = None,
    bias_HS: Tensor | None = None,
    is_bf16: bool = False,
) -> tuple[Tensor, Tensor]:
    """Output [H, G, T, D] and natural-log-sum-exp [H, G, T] of one part. `causal`: query t sees slots 0 .. S - T + t. A
    mask may have heads in front, as [H, 1, T, S]; biases, which go with neither, are added to scaled scores. `is_bf16`:
    queries, keys and values are numbers of a bf16 model, so a CPU may round them to bf16."""
    assert bias_HS is None or (mask_TS is None and not causal)
    if mask_TS is None and q_HGTD.is_cuda and q_HGTD.dtype in (torch.float16, torch.bfloat16):
        q_QTD = q_HGTD.flatten(0, 1)
        if bias_HS is None:
            out_QTD, lse_QT = sdpa(q_QTD, k_HSD, v_HSD, scale, causal)
        else:
            out_QTD, lse_QT = sdpa_with_bias(q_QTD, k_HSD, v_HSD, scale, bias_HS)
        return out_QTD.unflatten(0, q_HGTD.shape[:2]), lse_QT.unflatten(0, q_HGTD.shape[:2])
    if q_HGTD.device.type != "cpu":
        return attend_reference(q_HGTD, k_HSD, v_HSD, scale, causal=causal, mask_TS=mask_TS, bias_HS=bias_HS)
    if mask_TS is None and bias_HS is None and (kernel := _compiled(q_HGTD, k_HSD, v_HSD, scale, causal, is_bf16)):
        return kernel.attend(q_HGTD, k_HSD, v_HSD, scale, causal=causal)
    num_groups, num_queries = q_HGTD.shape[1:3]
    before = k_HSD.shape[1] - num_queries
    if causal and before:  # this operator's mask is aligned at the top left
        earlier = attend(q_HGTD, k_HSD[:, :before], v_HSD[:, :before], scale)
        own = attend(q_HGTD, k_HSD[:, before:], v_HSD[:, before:], scale, causal=True)
        return blend_reference(*earlier, *own)
    if num_groups > 1 and not causal and (mask_TS is None or num_queries == 1):
        # As tokens, the queries of a group read their keys at once.
        q_H1ND = q_HGTD.flatten(1, 2).unsqueeze(1)
        out, lse = attend(q_H1ND, k_HSD, v_HSD, scale, mask_TS=mask_TS, bias_HS=bias_HS)
        return out.view(q_HGTD.shape), lse.view(q_HGTD.shape[:-1])
    if causal and num_queries > _CPU_TRIANGLE:
        return _attend_in_halves(q_HGTD, k_HSD, v_HSD, scale)
    added = None
    if bias_HS is not None:
        added = bias_HS.to(q_HGTD.dtype)[:, None, None].expand(-1, 1, q_HGTD.shape[2], -1)
    elif mask_TS is not None:
        added = torch.zeros_like(mask_TS, dtype=q_HGTD.dtype).masked_fill_(~mask_TS, -torch.inf)
        added = added.expand(*mask_TS.shape[:-2], q_HGTD.shape[2], -1)
    shape = (k_HSD.shape[0], q_HGTD.shape[1], *k_HSD.shape[1:])
    k_HGSD, v_HGSD = k_HSD.unsqueeze(1).expand(shape), v_HSD.unsqueeze(1).expand(shape)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_HGTD, k_HGSD, v_HGSD, 0.0, causal, attn_mask=added, scale=scale
    )
    if mask_TS is not None:  # the operator says 0 for a query that sees nothing
        lse = lse.masked_fill(~mask_TS.any(-1), -torch.inf)
    return out, lse


def _compiled(
    q_HGTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, causal: bool, is_bf16: bool
) -> PanelCall | None:
    """A kernel for these, where there is one and the queries fill its lanes; else None. It takes all causal ones: a
    prompt's last tokens, however few, are to get the same bits over a stored prefix."""
    if not HAS_AVX512_KERNELS or not (causal or q_HGTD.shape[1:3].numel() >= _FEWEST_LANES):
        return None
    found = cpu_attention(q_HGTD.shape[-1], is_bf16)
    return found if found.can_attend(q_HGTD, k_HSD, v_HSD, scale) else None


def _attend_in_halves(q_HGTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal, as two triangles and the square between them: a CPU takes as long for one triangle as for its square."""
    half = q_HGTD.shape[2] // 2
    q, k, v = ((x[..., :half, :], x[..., half:, :]) for x in (q_HGTD, k_HSD, v_HSD))
    first = attend(q[0], k[0], v[0], scale, causal=True)
    square, second = attend(q[1], k[0], v[0], scale), attend(q[1], k[1], v[1], scale, causal=True)
    out, lse = zip(first, blend_reference(*square, *second), strict=True)
    return torch.cat(out, dim=2), torch.cat(lse, dim=2)


def causal_mask(q_HGTD: Tensor, k_HSD: Tensor) -> Tensor:
    """bool [T, S]: the queries' own slots are the last of S."""
    num_queries, num_slots = q_HGTD.shape[2], k_HSD.shape[1]
    whole_TS = torch.ones(num_queries, num_slots, dtype=torch.bool, device=q_HGTD.device)
    return whole_TS.tril(diagonal=num_slots - num_queries)


def attend_reference(
    q_HGTD: Tensor,
    k_HSD: Tensor,
    v_HSD: Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask_TS: Tensor | None = None,
    bias_HS: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain operations and fp32; what every fast path is compared with."""
    score = q_HGTD.float() @ k_HSD.float().unsqueeze(1).transpose(-1, -2) * scale
    if bias_HS is not None:
        score = score + bias_HS[:, None, None].float()
    if causal:
        mask_TS = causal_mask(q_HGTD, k_HSD)
    if mask_TS is not None:
        score = score.masked_fill(~mask_TS, -torch.inf)
    lse = torch.logsumexp(score, dim=-1)
    weight = torch.exp(score - lse.unsqueeze(-1)).nan_to_num(0.0)
    return (weight @ v_HSD.float().unsqueeze(1)).to(q_HGTD.dtype), lse


class LseMerge:
    """Running merge of parts, in fp32. A part may cover some of the heads; parts of ascending heads are joined
    first."""

    def __init__(self, q_HGTD: Tensor) -> None:
        self._q = q_HGTD
        self._out_HGTD: Tensor | None = None
        self._lse_HGT: Tensor | None = None
        self._parts: list[tuple[Tensor, Tensor]] = []  # of heads 0 to self._covered
        self._covered = 0

    def add(self, heads: slice, out: Tensor, lse: Tensor) -> None:
        if heads.start < self._covered:
            self._flush()
        self._fill(heads.start)
        self._parts.append((out, lse))
        self._covered = heads.stop
        if self._covered == self._q.shape[0]:
            self._flush()

    def _fill(self, head: int) -> None:
        """Up to `head`, heads that this part does not cover see nothing."""
        if head > self._covered:
            missing = self._q[self._covered : head]
            nothing = torch.full(missing.shape[:-1], -torch.inf, dtype=torch.float32, device=missing.device)
            self._parts.append((torch.zeros_like(missing), nothing))
            self._covered = head

    def _flush(self) -> None:
        if not self._parts:
            return
        self._fill(self._q.shape[0])
        out, lse = self._parts[0]
        if len(self._parts) > 1:
            out, lse = (torch.cat(tensors) for tensors in zip(*self._parts, strict=True))
        self._parts, self._covered = [], 0
        if self._out_HGTD is None or self._lse_HGT is None:
            self._out_HGTD, self._lse_HGT = out, lse
            return
        # The share of the new part; -inf on both sides (nothing seen yet) must not become NaN.
        share = torch.sigmoid(lse - self._lse_HGT).nan_to_num(0.0)
        self._out_HGTD = torch.lerp(self._out_HGTD.float(), out.float(), share.unsqueeze(-1))
        self._lse_HGT = torch.logaddexp(self._lse_HGT, lse)

    @property
    def lse_HGT(self) -> Tensor | None:
        """Log-sum-exp over everything added, or None."""
        self._flush()
        return self._lse_HGT

    def result(self) -> Tensor:
        self._flush()
        return torch.zeros_like(self._q) if self._out_HGTD is None else self._out_HGTD.to(self._q.dtype)


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
