"""Two parts of attention join to the whole, in plain operations and in the kernel.

Q query heads   T queries   S slots   D head dim
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.attend.lse_merge import attend, attend_reference, blend_reference, sdpa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="fused kernels run on a GPU")


def draw(t: int, s: int, d: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t * s + d)
    shapes = ((2, 3, t, d), (2, s, d), (2, s, d))
    q, k, v = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    return q, k, v


def halves(q: Tensor, k: Tensor, v: Tensor, cut: int) -> tuple[Tensor, ...]:
    """Output and log-sum-exp of slots before the cut and after it, heads flattened."""
    parts = (attend_reference(q, k[:, mine], v[:, mine], 0.2) for mine in (slice(0, cut), slice(cut, None)))
    return tuple(tensor.flatten(0, 1) for part in parts for tensor in part)


def blend_kernel(*parts: Tensor) -> tuple[Tensor, Tensor]:
    pytest.importorskip("triton")
    from kvfold.attend.kernels.blend import blend

    return blend(*parts)


@pytest.mark.parametrize("blend", [blend_reference, blend_kernel])
@pytest.mark.parametrize(("t", "d"), [(1, 64), (17, 96), (33, 128)])
def test_two_parts_blend_to_the_whole(blend: object, t: int, d: int) -> None:
    q, k, v = draw(t, 40, d)
    assert callable(blend)
    out, lse = blend(*halves(q, k, v, 13))
    expected = attend_reference(q, k, v, 0.2)
    torch.testing.assert_close(out, expected[0].flatten(0, 1), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(lse, expected[1].flatten(0, 1), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("blend", [blend_reference, blend_kernel])
def test_a_part_that_saw_nothing_changes_nothing(blend: object) -> None:
    """Also not where neither saw anything: zeros stay zeros, log-sum-exp stays -inf."""
    q, k, v = draw(9, 40, 64)
    out, lse = (tensor.flatten(0, 1) for tensor in attend_reference(q, k, v, 0.2))
    nothing, never = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    assert callable(blend)
    for parts in ((out, lse, nothing, never), (nothing, never, out, lse)):
        found = blend(*(part.clone() for part in parts))
        torch.testing.assert_close(found, (out, lse))
    found = blend(nothing.clone(), never, nothing, never)
    assert torch.equal(found[0], nothing) and torch.equal(found[1], never)


def test_the_kernel_reads_heads_that_lie_side_by_side() -> None:
    """Outputs come as [T, Q, D] in memory, seen as [Q, T, D]."""
    q, k, v = draw(19, 40, 64)
    a, a_lse, b, b_lse = halves(q, k, v, 20)
    expected = blend_reference(a, a_lse, b, b_lse)
    strided = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (a, b))
    sa, sb = strided
    found = blend_kernel(sa, a_lse, sb, b_lse)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    assert found[0].data_ptr() == sa.data_ptr()


@pytest.mark.parametrize(("t", "s"), [(1, 5), (7, 7), (7, 30)])
def test_causal_queries_are_the_last_slots(t: int, s: int) -> None:
    q, k, v = draw(t, s, 64)
    found = attend(q, k, v, 0.2, causal=True)
    mask = torch.arange(s, device=DEVICE) <= torch.arange(s - t, s, device=DEVICE).unsqueeze(-1)
    expected = attend_reference(q, k, v, 0.2, mask_TS=mask)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@needs_gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("t", "s"), [(5, 300), (1024, 1024), (2048, 5000), (1500, 1777)])
def test_fused_equals_the_formula(t: int, s: int, causal: bool) -> None:
    """Short queries go to FlashAttention, long ones to whatever torch prefers on this device."""
    q, k, v = draw(t, s, 128, torch.bfloat16)
    out, lse = sdpa(q.flatten(0, 1), k, v, 0.09, causal)
    expected = attend_reference(q, k, v, 0.09, causal=causal)
    error = (out.float() - expected[0].flatten(0, 1).float()).norm() / expected[0].float().norm()
    assert error < 1e-2
    torch.testing.assert_close(lse, expected[1].flatten(0, 1), atol=2e-3, rtol=2e-3)
