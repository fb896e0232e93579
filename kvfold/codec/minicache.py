"""`minicache`: two adjacent layers share directions (MiniCache, arXiv:2405.14366); each keeps its norms.

The paper finds that keys, and values, of one token point nearly the same way in adjacent layers of a model's upper
half. It is not so in every model: in SmolLM2-135M and Qwen2.5-Coder-1.5B they are as good as orthogonal (mean cosines
of keys -0.04 and -0.02), and merged layers cannot answer; try it on yours before you use it.

The layer below stores its own norm along a direction between both; this layer stores a norm, and finds the direction
there. In every group of slots, those in which the two layers agree least are kept as they are, in both layers. RoPE
rotates both layers of a token alike, so keys are merged as they are cached.

    N flat slots   D head dim   B groups   K kept slots of a group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kvfold.codec.base import CrossLayerCodec, Field, Fields, Side, Slots, State
from kvfold.errors import InputError, PolicyError
from kvfold.policy.registry import register

GROUP = 16  # slots that the least alike are looked for in
_FLAT = 1e-3  # angles whose sine is smaller are interpolated along the chord


@register(
    "codec", "minicache", paper="arXiv:2405.14366",
    published="differs: `kept` of 16 slots stay whole, not those beyond a threshold",
)  # fmt: skip
@dataclass(frozen=True)
class MiniCache(CrossLayerCodec):
    """A layer shares the directions of the layer below and keeps its norms, and `kept` of 16 slots whole.

    e = sin((1-t) w)/sin(w) u1 + sin(t w)/sin(w) u2 with u1, u2 the directions of both layers' slots and w the angle
    between them; the layer below stores |x1| e, this one |x2|. Give it every second layer, `layers=16::2`.

    Against the paper: the `kept` least alike of every 16 slots stay whole, where it keeps those beyond a threshold
    relative to the whole prompt (5 % of its range), so that bytes are known beforehand; a norm is bf16, and that of the
    layer below stands in what it stores.
    """

    t: float = 0.6
    kept: int = 1

    relocatable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 <= self.t <= 1:
            raise PolicyError(f"minicache(t={self.t}): t lies between 0, the layer below, and 1, this layer")
        if not 0 <= self.kept < GROUP:
            raise PolicyError(f"minicache(kept={self.kept}): kept is at least 0 and less than {GROUP}")

    def group(self, side: Side) -> int:
        return GROUP

    def fields(self, side: Side, head_dim: int, kv_dtype: torch.dtype) -> tuple[Field, ...]:
        norm = Field("norm", torch.bfloat16, 1)
        if not self.kept:
            return (norm,)
        whole = Field("x", kv_dtype, self.kept * head_dim, "group")
        return (norm, whole, Field("which", torch.uint8, self.kept, "group"))

    def merge_below(self, side: Side, below_ND: Tensor, x_ND: Tensor) -> Tensor:
        """|x1| e, or x1 where the slot is kept."""
        lower_ND, upper_ND = below_ND.float(), x_ND.float()
        e_ND = between(functional.normalize(lower_ND, dim=-1), functional.normalize(upper_ND, dim=-1), self.t)
        merged_ND: Tensor = (torch.linalg.vector_norm(lower_ND, dim=-1, keepdim=True) * e_ND).to(below_ND.dtype)
        kept_N = self._least_alike(lower_ND, upper_ND)
        merged_ND[kept_N] = below_ND[kept_N]
        return merged_ND

    def encode(self, side: Side, slots: Slots, state: State) -> dict[str, Tensor]:
        x_ND = slots.x_ND
        norm_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True, dtype=torch.float32).to(torch.bfloat16)
        if not self.kept:
            return {"norm": norm_N1}
        # What is kept in the layer below was not merged, so these are again the least alike.
        kept_N = self._least_alike(_given(slots.below_ND), x_ND.float())
        which_BK = kept_N % GROUP
        return {
            "norm": norm_N1,
            "x": x_ND[kept_N].view(-1, self.kept * x_ND.shape[1]),
            "which": which_BK.view(-1, self.kept).to(torch.uint8),
        }

    def decode(self, side: Side, fields: Fields, dtype: torch.dtype, below_ND: Tensor | None = None) -> Tensor:
        below_ND = _given(below_ND)
        x_ND = functional.normalize(below_ND, dim=-1) * fields["norm"].float()
        if self.kept:
            first_B1 = torch.arange(0, len(x_ND), GROUP, device=x_ND.device).unsqueeze(-1)
            kept_N = (first_B1 + fields["which"] % GROUP).flatten()  # one not yet written may say anything
            x_ND[kept_N] = fields["x"].float().view(-1, x_ND.shape[1])
        return x_ND.to(dtype)

    def _least_alike(self, lower_ND: Tensor, upper_ND: Tensor) -> Tensor:
        """Indices of the kept slots, group after group."""
        alike_N = torch.cosine_similarity(lower_ND, upper_ND, dim=-1)
        place_BK = alike_N.view(-1, GROUP).topk(self.kept, dim=1, largest=False).indices
        first_B1 = torch.arange(0, len(alike_N), GROUP, device=alike_N.device).unsqueeze(-1)
        return (first_B1 + place_BK).flatten()


def between(u_ND: Tensor, w_ND: Tensor, t: float) -> Tensor:
    """The unit vectors a part t of the way from u to w along the sphere; u where the two are opposite."""
    angle_N1 = (u_ND * w_ND).sum(-1, keepdim=True).clamp(-1, 1).arccos()
    sine_N1 = angle_N1.sin()
    arc_ND = (((1 - t) * angle_N1).sin() * u_ND + (t * angle_N1).sin() * w_ND) / sine_N1
    chord_ND = functional.normalize((1 - t) * u_ND + t * w_ND, dim=-1)
    chord_ND = torch.where(angle_N1 > torch.pi / 2, u_ND, chord_ND)
    return torch.where(sine_N1 < _FLAT, chord_ND, arc_ND)


def _given(below_ND: Tensor | None) -> Tensor:
    if below_ND is None:
        raise InputError("minicache needs the slots of the layer below, which are missing; give it layers=1::2")
    return below_ND.float()
