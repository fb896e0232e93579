"""Attention to slots with log-biases: every path gives what the plain formula gives.

H KV heads   G query heads per KV head   T queries   S slots   D head dim
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvfold.attend import lse_merge
from kvfold.attend.lse_merge import attend, attend_reference, sdpa_with_bias

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def draw(device: str, dtype: torch.dtype, head_dim: int = 64, num_queries: int = 7) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k, v = random(2, 3, num_queries, head_dim), random(2, 90, head_dim), random(2, 90, head_dim)
    return q.to(dtype), k.to(dtype), v.to(dtype), random(2, 90) * 2


def test_a_bias_multiplies_weights() -> None:
    """A bias of ln 3 is the slot three times."""
    q, k, v, _ = draw("cpu", torch.float32)
    bias_HS = torch.zeros(2, 90)
    bias_HS[0, 5] = torch.tensor(3.0).log()
    thrice = torch.cat((k[:1], k[:1, 5:6], k[:1, 5:6]), 1), torch.cat((v[:1], v[:1, 5:6], v[:1, 5:6]), 1)
    found, expected = attend_reference(q, k, v, 0.125, bias_HS=bias_HS), attend_reference(q[:1], *thrice, 0.125)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine[:1], theirs)


def test_a_cpu_agrees_with_the_formula() -> None:
    q, k, v, bias_HS = draw("cpu", torch.float32)
    found, expected = (path(q, k, v, 0.125, bias_HS=bias_HS) for path in (attend, attend_reference))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_biases_as_channels_agree_with_the_formula(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU stand in as a formula that knows no biases; channels are as many as they take."""
    q, k, v, bias_HS = draw("cpu", torch.bfloat16, head_dim)

    def plain(q_QTD: Tensor, k_HSD: Tensor, v_HSD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        assert q_QTD.shape[-1] == k_HSD.shape[-1] == v_HSD.shape[-1] and q_QTD.shape[-1] % 8 == 0 and not causal
        out, lse = attend_reference(q_QTD.unflatten(0, (2, 3)), k_HSD, v_HSD, scale)
        return out.flatten(0, 1), lse.flatten(0, 1)

    monkeypatch.setattr(lse_merge, "sdpa", plain)
    out_QTD, lse_QT = sdpa_with_bias(q.flatten(0, 1), k, v, 0.125, bias_HS)
    expected = attend_reference(q, k, v, 0.125, bias_HS=bias_HS)
    torch.testing.assert_close(out_QTD, expected[0].flatten(0, 1), atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse_QT, expected[1].flatten(0, 1), atol=1e-3, rtol=1e-4)


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_queries", [1, 7, 1500])
def test_a_gpu_agrees_with_the_formula(head_dim: int, num_queries: int) -> None:
    q, k, v, bias_HS = draw("cuda", torch.bfloat16, head_dim, num_queries)
    found, expected = (path(q, k, v, 0.125, bias_HS=bias_HS) for path in (attend, attend_reference))
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
