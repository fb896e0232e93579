"""Plain types of all levels: the shape of a model's KV cache (GQA heads, sliding windows) and its rotary embedding.

Imports nothing of ours. Shape suffixes used all over the project:

    R rows ((sequence, KV head) pairs of one layer, sequence-major)   S slots of a row   D head dim
    H KV heads   Q query heads   G query heads per KV head   T tokens   L layers   W window of queries   N flat slots
    M hidden dims   X = Q * D
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None  # kernel files are imported where it is
HAS_NUMBA = find_spec("numba") is not None  # the same for kernels on a CPU
HAS_AVX512_KERNELS = HAS_NUMBA and torch.backends.cpu.get_cpu_capability() == "AVX512"

Compile = Literal["auto"] | bool  # whether decode steps on a GPU are compiled: at once, never, or once that pays


@cache
def has_amx_kernels() -> bool:
    """Whether kernels on a CPU multiply bf16 numbers by AMX tiles; asking the system is what permits them."""
    if not HAS_AVX512_KERNELS or not torch.cpu._is_amx_tile_supported():
        return False
    from llvmlite import binding
    from numba import config

    is_host = config.CPU_NAME is None  # or LLVM compiles for another CPU
    has = binding.get_host_cpu_features()
    return is_host and bool(has.get("amx-bf16") and has.get("avx512bf16")) and bool(torch.cpu._init_amx())


@cache
def _on_device(frequencies: tuple[float, ...], device: torch.device) -> Tensor:
    """float64; copied once, for a copy to a GPU waits until the GPU has done all it was given."""
    with torch.inference_mode(False):  # or they could not be used outside of it
        return torch.tensor(frequencies, dtype=torch.float64, device=device)


@dataclass(frozen=True)
class Rope:
    """A rotary embedding with fixed frequencies: dims (i, i + rotary_dim/2) of the first rotary_dim rotate together.

    `frequencies` already contain the model's scaling (Llama-3, YaRN, linear); `attention_scale` is YaRN's
    factor on cos and sin. `depends_on_length` marks kinds whose frequencies change with the prompt.
    """

    frequencies: tuple[float, ...]  # rotary_dim / 2 values, radians per position
    attention_scale: float = 1.0
    interleaved: bool = False  # pairs (2i, 2i+1) instead of halves
    depends_on_length: bool = False

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.frequencies)

    def angles(self, positions: Tensor) -> Tensor:
        """Angles [..., rotary_dim/2] of float64 precision, returned as fp32, for integer positions [...]."""
        angle = positions.to(torch.float64).unsqueeze(-1) * _on_device(self.frequencies, positions.device)
        return torch.remainder(angle, 2 * math.pi).float()

    def inverse_periods(self, device: torch.device) -> Tensor:
        """Rotations per position, float64 [rotary_dim/2]."""
        return _on_device(self.frequencies, device) / (2 * math.pi)

    def cos_sin(self, positions: Tensor, end: int | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin [..., rotary_dim/2] of integer positions [...]. With an `end`, those from 0 up to it are looked
        up in a table that is kept; all others get some of these."""
        if end is None:
            angles = self.angles(positions)
            return angles.cos(), angles.sin()
        cos_PF, sin_PF = _table(self, 1 << (end - 1).bit_length(), positions.device)
        index = positions.clamp(0, end - 1)
        return cos_PF[index], sin_PF[index]

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [..., D] by integer positions [...] (negative: back); no attention_scale."""
        return self.apply(x, *self.cos_sin(positions))

    def apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply given cos and sin [..., rotary_dim/2] to the rotary part of x [..., D]."""
        half = self.rotary_dim // 2
        rotary, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
        if self.interleaved:
            a, b = rotary[..., 0::2], rotary[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = rotary[..., :half], rotary[..., half:]
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return torch.cat((rotated.to(x.dtype), rest), dim=-1)


@lru_cache(maxsize=4)
def _table(rope: Rope, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the first positions; models have one rope or two, and lengths double."""
    with torch.inference_mode(False):
        return rope.cos_sin(torch.arange(length, device=device))


@dataclass(frozen=True)
class LayerSpec:
    """What one attention layer stores: `sliding_window` layers keep their window and are never compressed."""

    num_kv_heads: int
    num_query_heads: int
    head_dim: int
    scale: float  # factor on q.k
    sliding_window: int | None = None
    rope: Rope | None = None
    # The projection of attention's output [M, Q * D], the model's own tensor, for scorers that need it.
    wo_MX: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> int:
        return self.num_query_heads // self.num_kv_heads

    @property
    def compressible(self) -> bool:
        return self.sliding_window is None

    @property
    def wo_HGDM(self) -> Tensor | None:
        """The output projection by KV head and query head: what a value adds to M hidden dims is v @ wo[h, g]."""
        if self.wo_MX is None:
            return None
        return self.wo_MX.detach().t().view(self.num_kv_heads, self.group, self.head_dim, -1)


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model's cache, and what identifies its weights."""

    name: str
    family: str
    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype  # of the weights and of attention
    kv_dtype: torch.dtype  # of an uncompressed slot
    max_positions: int
    vocab_size: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    # Hashes the weights; called on first use, since it takes seconds.
    digest: Callable[[], str] = field(default=str, compare=False, repr=False)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Worked out once: every new sequence looks for what others of its model have."""
        return hash((self.name, self.family, self.layers, self.max_positions, self.vocab_size))

    @cached_property
    def weights_digest(self) -> str:
        """Digest of the weights; empty if unknown."""
        return self.digest()

    @property
    def is_bf16(self) -> bool:
        """Whether both are, so that queries, keys and values are bf16 numbers, whatever dtype holds them."""
        return self.dtype == self.kv_dtype == torch.bfloat16

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def compressible_layers(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.compressible)

    def full_bytes(self, num_tokens: int) -> int:
        """Bytes the model's ordinary cache would hold in bf16 after num_tokens (sliding layers hold their window)."""
        total = 0
        for layer in self.layers:
            kept = num_tokens if layer.sliding_window is None else min(num_tokens, layer.sliding_window)
            total += kept * layer.num_kv_heads * layer.head_dim * 2 * 2
        return total
