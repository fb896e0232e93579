"""Keys stored as Hadamard(k - mean), for codecs with a scale per slot.

The mean key of a row takes away the channels that are large for every token, the rotation spreads what is left (QuaRot,
arXiv:2404.00456), so that codes per slot, which can be appended and moved, come close to those per channel, which
cannot. Scores stay whole: q.k = rotate(q).stored + q.mean. Values are stored as they are: a rotation would have to be
undone at every read.

    R rows   S slots   N flat slots   D head dim   X queries
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvfold.codec import grid, hadamard
from kvfold.codec.base import Codec, Side, Slots, State


@dataclass(frozen=True)
class CentredCodec(Codec):
    """Common part; how slots are coded in that basis is left to others."""

    def has_state(self, side: Side) -> bool:
        return side == "k"

    def init_state(self, side: Side, x_RSD: Tensor, valid_RS: Tensor) -> State:
        """Keys: the mean of each row's valid slots, fp32 [R, D] (0 for a row without slots)."""
        if side == "v":
            return {}
        x = grid.finite(x_RSD) * valid_RS.unsqueeze(-1)
        return {"mean": x.sum(1) / valid_RS.sum(1).clamp(min=1).unsqueeze(-1)}

    def centred(self, side: Side, slots: Slots, state: State) -> Tensor:
        """What `encode` codes: finite slots [N, D] in fp32, keys in the stored basis."""
        x_ND = grid.finite(slots.x_ND)
        return hadamard.rotate(x_ND - state["mean"][slots.row_N]) if side == "k" else x_ND

    def restore(self, side: Side, x_ND: Tensor, state: State, row_N: Tensor) -> Tensor:
        if side == "v":
            return x_ND
        return (hadamard.rotate(x_ND) + state["mean"][row_N]).to(x_ND.dtype)

    def query(self, q_RXD: Tensor, state: State) -> tuple[Tensor, Tensor | None]:
        offset_RX = (q_RXD.float() @ state["mean"].unsqueeze(-1)).squeeze(-1)
        return hadamard.rotate_read(q_RXD).to(q_RXD.dtype), offset_RX
