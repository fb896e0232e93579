"""What budgets are measured against: bytes of the ordinary bf16 cache, on published shapes."""

from __future__ import annotations

import pytest
import torch

from kvfold.core import LayerSpec, ModelSpec


def spec(layers: int, kv_heads: int, head_dim: int, sliding: int = 0, window: int = 1024) -> ModelSpec:
    """A model of so many layers, of which the first `sliding` have a sliding window."""
    full = LayerSpec(kv_heads, kv_heads, head_dim, head_dim**-0.5)
    local = LayerSpec(kv_heads, kv_heads, head_dim, head_dim**-0.5, sliding_window=window)
    stack = (local,) * sliding + (full,) * (layers - sliding)
    return ModelSpec("hand-made", "llama", stack, torch.bfloat16, torch.bfloat16, 131072, 32000)


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "bytes_per_token"),
    [
        pytest.param(40, 40, 128, 819_200, id="llama-2-13b"),
        pytest.param(32, 32, 128, 524_288, id="llama-2-7b"),
        pytest.param(80, 8, 128, 327_680, id="llama-2-70b"),
        pytest.param(32, 8, 128, 131_072, id="llama-3.1-8b"),
        pytest.param(30, 3, 64, 23_040, id="smollm2-135m"),
        pytest.param(28, 2, 128, 28_672, id="qwen2.5-1.5b"),
    ],
)
def test_bytes_per_token(layers: int, kv_heads: int, head_dim: int, bytes_per_token: int) -> None:
    assert spec(layers, kv_heads, head_dim).full_bytes(1) == bytes_per_token


@pytest.mark.parametrize(
    ("tokens", "gigabytes"), [(500, 0.4096), (2_500, 2.048), (5_000, 4.096), (10_000, 8.192), (100_000, 81.92)]
)
def test_totals_of_a_13b(tokens: int, gigabytes: float) -> None:
    assert spec(40, 40, 128).full_bytes(tokens) == round(gigabytes * 1e9)


def test_totals_at_131072_tokens() -> None:
    assert spec(32, 32, 128).full_bytes(131_072) == 64 * 2**30
    assert spec(32, 8, 128).full_bytes(131_072) == 16 * 2**30


def test_sliding_layers_hold_their_window() -> None:
    mixed = spec(4, 1, 64, sliding=3, window=100)
    assert mixed.full_bytes(1000) == (3 * 100 + 1000) * 64 * 2 * 2
    assert mixed.full_bytes(50) == 4 * 50 * 64 * 2 * 2
    assert mixed.compressible_layers == (3,)
