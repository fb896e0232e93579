"""Slot values scattered to positions, so that rows that hold different slots can be combined by token.

R rows   S slots   P positions, and one more column at the end that padding is sent to
"""

from __future__ import annotations

from torch import Tensor

from kvfold.score.base import View


def by_position(x_RS: Tensor, view: View, fill: float) -> Tensor:
    """[R, P + 1]: the slots' numbers at their positions, `fill` where a row holds no slot. No two slots of a row share
    a position, so nothing is added up and the result is the same on every device."""
    num_positions = int(view.seen_R.max())
    x_RS = x_RS.masked_fill(~view.valid_RS, fill)
    index_RS = view.position_RS.masked_fill(~view.valid_RS, num_positions)
    return x_RS.new_full((len(x_RS), num_positions + 1), fill).scatter(1, index_RS, x_RS)
