"""`palu`: low-rank latents instead of keys and values (Palu, arXiv:2407.21118); the projection is codec/basis.py.

G groups   X channels of a group   r latents of a group
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvfold.codec.base import SIDES, Codec, Field, Fields, Side, Slots, State
from kvfold.codec.basis import Bases, Basis, LowRankCodec, mixing
from kvfold.codec.native import Native
from kvfold.errors import FileError, PolicyError
from kvfold.policy.registry import check_file_name, register, stated_content
from kvfold.policy.text import literal

if TYPE_CHECKING:
    from kvfold.core import ModelSpec, Rope

STEP = 4  # a head's latents are a multiple of it: packed codes then fill bytes
_AS_THEY_ARE = Native()


@register(
    "codec", "palu", paper="arXiv:2407.21118", cost="L·d·r a step; measured once for a model",
    published="differs: ranks follow what each axis is worth, values are rebuilt",
)  # fmt: skip
@dataclass(frozen=True)
class Palu(LowRankCodec):
    """Groups of heads as latents of low rank, keys before RoPE; `rank` of the channels stay, coded by `latents`.

    latent = mix U_r^T (x - mean), with U_r the axes of the model that `kvfold calibrate` found worth most and mix an
    orthonormal matrix that evens latents out; back by the transposes, keys then rotated to their positions. `rank` is
    what is kept, as a mean over keys and values of all layers: the paper's 30 % is removed, `rank=0.7`. A layer and
    side starts with 4 latents a head; the 4 a head that are worth most come next, until `rank` is reached.

    Against the paper: axes are those of keys and values themselves, which is the same (codec/basis.py) but covers
    models that normalise keys, and their mean is taken away; ranks follow what every axis is worth, not one number for
    a layer; values are rebuilt, not folded into the output projection; the mixing matrix is Hartley's.

    `latents` is a codec whose slots can move alone. `digest` is filled in from the file's content; where a policy
    states it, as a saved session does, another content is refused.
    """

    file: str
    latents: Codec = _AS_THEY_ARE
    rank: float = 0.7
    digest: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.rank <= 1:
            raise PolicyError(f"palu: rank is a share above 0 and at most 1, not {self.rank}")
        if not self.latents.relocatable or self.latents.needs_basis:
            raise PolicyError(
                f"palu: latents cannot be coded by {literal(self.latents)}; use native, bf16, fp8, int8, int4 or int2"
            )
        check_file_name("palu", self.file)
        object.__setattr__(self, "digest", stated_content("palu", self.file, self.digest, self.measured.digest))

    @cached_property
    def measured(self) -> Bases:
        """Read once, so that what the policy means does not change with the file."""
        try:
            return Bases.read(Path(self.file))
        except FileError as error:
            raise PolicyError(f"palu: {error}; write one with kvfold calibrate --model MODEL --out FILE") from None

    @property
    def heads_together(self) -> int:
        return self.measured.num_heads

    @property
    def identity(self) -> str:
        """What a fingerprint knows of it."""
        latents = literal(self.latents, defaults=True)
        return f"palu(latents={latents}, rank={self.rank}, content={self.measured.digest})"

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return self.latents.fields("v", head_dim, kv_dtype)

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        return self.latents.encode("v", slots, state)

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype) -> Tensor:
        return self.latents.decode("v", fields, dtype)

    def check(self, spec: ModelSpec) -> None:
        if not self.measured.fits(spec):
            raise PolicyError(
                f'palu(file="{self.file}") was measured on {self.measured.model}, other weights than those of '
                f"{spec.name}; measure these with kvfold calibrate"
            )
        if any((rope := spec.layers[i].rope) is not None and rope.depends_on_length for i in spec.compressible_layers):
            raise PolicyError(
                f"palu rotates keys back to position 0, and RoPE frequencies of {spec.name} depend on the length; use "
                "int4 for this model"
            )

    def basis(self, side: Side, spec: ModelSpec, layer: int, device: torch.device) -> Basis:
        rope = spec.layers[layer].rope if side == "k" else None
        return _basis(self.measured, side, layer, self.widths[layer, side], rope, device)

    @cached_property
    def widths(self) -> Mapping[tuple[int, Side], int]:
        """Latents of a head, by layer and side: one step for each, then the steps that are worth most."""
        size, bases = self.measured.num_heads, self.measured.layers
        sides = {(layer, side): bases[layer][side].worth_GX for layer in bases for side in SIDES}
        steps = [
            (-float(worth_GX[:, begin : begin + size * STEP].sum()), place, key)
            for key, worth_GX in sides.items()
            for place, begin in enumerate(range(0, worth_GX.shape[1], size * STEP))
        ]
        more = sorted(step for step in steps if step[1])[: max(0, round(self.rank * len(steps)) - len(sides))]
        taken = Counter([*sides, *(key for _, _, key in more)])
        return {key: min(STEP * taken[key], worth_GX.shape[1] // size) for key, worth_GX in sides.items()}


@lru_cache(maxsize=1024)
def _basis(measured: Bases, side: Side, layer: int, width: int, rope: Rope | None, device: torch.device) -> Basis:
    """Made once: sequences ask for it whenever they begin or fork."""
    found, rank = measured.layers[layer][side], width * measured.num_heads
    axes_GXr = found.axes_GXX[..., :rank].double() @ mixing(rank)
    return Basis(measured.num_heads, found.mean_GX.to(device), axes_GXr.float().to(device), rope)
