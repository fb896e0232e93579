"""`aqua`: what the layer below does not tell of a layer, in few bits (AQUA-KV, arXiv:2501.19392); see codec/lift.py.

N flat slots   D head dim
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvfold.codec import hadamard
from kvfold.codec.base import Codec, Field, Fields, Side, Slots, State
from kvfold.codec.integer import Int2, Int4
from kvfold.codec.lift import Lift
from kvfold.codec.lifts import Lifts
from kvfold.errors import FileError, InputError, PolicyError
from kvfold.policy.content import check_file_name, stated_content
from kvfold.policy.registry import register
from kvfold.policy.spell import literal

if TYPE_CHECKING:
    from kvfold.core import ModelSpec, Rope

_FEW, _MORE = Int2(), Int4()


@register(
    "codec",
    "aqua",
    revision=2,
    paper="arXiv:2501.19392",
    cost="L·H·d² a step in lifted layers; measured once for a model",
    published="differs: not AQUA-KV, only its idea: every second layer, scalar grids, values from values",
)
@dataclass(frozen=True)
class Aqua(Codec):
    """Every second layer as what the one below does not tell, coded by `rest`; the others are coded by `roots`.

    Stored is Hadamard(x - told), with told = W x_below + b of the layer below as a reader has it, and W and b of the
    model as `kvfold calibrate --for aqua` found them: ridge regression over all heads of a token, keys before RoPE.

    This is not AQUA-KV as published, only its idea: every second layer is told, where it chains them all and a read
    would need each below; values are told by the values below alone, not by their own keys too; codes are the grids of
    `rest`, not vectors; maps are fitted to slots that are not coded, so that one file serves all codes.

    `rest` and `roots` are codecs whose slots can move alone. `digest` is filled in from the file's content; where a
    policy states it, as a saved session does, another content is refused.
    """

    needs_below: ClassVar[bool] = True
    relocatable: ClassVar[bool] = False
    exact: ClassVar[int] = 4

    file: str
    rest: Codec = _FEW
    roots: Codec = _MORE
    digest: str = ""

    def __post_init__(self) -> None:
        for name, codec in (("rest", self.rest), ("roots", self.roots)):
            if not codec.relocatable or codec.needs_basis:
                raise PolicyError(
                    f"aqua: {name} cannot be coded by {literal(codec)}; use native, bf16, fp8, int8, int4 or int2"
                )
        check_file_name("aqua", self.file)
        object.__setattr__(self, "digest", stated_content("aqua", self.file, self.digest, self.measured.digest))

    @cached_property
    def measured(self) -> Lifts:
        """Read once, so that what the policy means does not change with the file."""
        try:
            return Lifts.read(Path(self.file))
        except FileError as error:
            raise PolicyError(
                f"aqua: {error}; write one with kvfold calibrate --for aqua --model MODEL --out FILE"
            ) from None

    @property
    def identity(self) -> str:
        """What a fingerprint knows of it."""
        rest, roots = (literal(codec, defaults=True) for codec in (self.rest, self.roots))
        return f"aqua(rest={rest}, roots={roots}, content={self.measured.digest})"

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return self, self.roots

    def at(self, layer: int) -> Codec:
        return self if layer in self.measured.layers else self.roots

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        return self.rest.fields("v", head_dim, kv_dtype)

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        rest_ND = hadamard.rotate(slots.x_ND.float() - _given(slots.below_ND))
        return self.rest.encode("v", Slots(rest_ND, slots.row_N), state)

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype, below_ND: Tensor | None = None) -> Tensor:
        rest_ND = hadamard.rotate_read(self.rest.decode("v", fields, torch.float32))
        return (rest_ND + _given(below_ND)).to(dtype)

    def check(self, spec: ModelSpec) -> None:
        if not self.measured.fits(spec):
            raise PolicyError(
                f'aqua(file="{self.file}") was measured on {self.measured.model}, other weights than those of '
                f"{spec.name}; measure these with kvfold calibrate --for aqua"
            )
        if any((rope := spec.layers[i].rope) is not None and rope.depends_on_length for i in spec.compressible_layers):
            raise PolicyError(
                f"aqua turns keys back to position 0, and RoPE frequencies of {spec.name} depend on the length; use "
                "int4 for this model"
            )

    def lift(self, side: Side, spec: ModelSpec, layer: int, device: torch.device) -> Lift:
        below_rope, rope = (spec.layers[i].rope if side == "k" else None for i in (layer - 1, layer))
        return _lift(self.measured, side, layer, below_rope, rope, device)


@lru_cache(maxsize=1024)
def _lift(
    measured: Lifts, side: Side, layer: int, below_rope: Rope | None, rope: Rope | None, device: torch.device
) -> Lift:
    """Made once: sequences ask for it whenever they begin or fork."""
    found = measured.layers[layer][side]
    return Lift(found.weight_CC.to(device), found.bias_C.to(device), below_rope, rope)


def _given(below_ND: Tensor | None) -> Tensor:
    if below_ND is None:
        raise InputError("aqua needs what the layer below tells, which is missing")
    return below_ND
