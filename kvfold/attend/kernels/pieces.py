"""What tasks are cut from: stretches of adjacent slots of one head that all appear moved by the same distance.

Without moves these are the extents. With them, an extent is cut at its bends; since addresses must stay aligned, a
piece begins with slots that belong to the one before, and says how many to skip:

    extent  | 0 1 2 3 | 40 41 …          positions, a bend at slot 4
    piece 0 | 0 1 2 3                    4 slots
    piece 1 | . . . .   40 41 …          skip 4

    E extents, segment by segment   P pieces   N bends   X heads of all layers   L layers   F address columns
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvfold.attend.kernels.moves import Moves, stored_lens
from kvfold.pages.table import Ints, SegmentTable


class Pieces(NamedTuple):
    """Oldest first within a head. `last_E`: the last piece of each extent, -1 where it has none."""

    layer_P: Ints
    head_P: Ints
    length_P: Ints  # with what is skipped
    skip_P: Ints
    turn_P: Ints
    address_PF: Ints
    last_E: Ints


def pieces_of(tables: Sequence[SegmentTable], moves: Moves | None) -> Pieces:
    """Of one sequence."""
    layer_E, head_E, row_E, address_EF = (
        np.concatenate([getattr(table.places, name) for table in tables])
        for name in ("layer_E", "head_E", "row_E", "address_EF")
    )
    length_E = np.concatenate([table.length_E for table in tables])
    if moves is None:
        none_E = np.zeros_like(length_E)
        return Pieces(layer_E, head_E, length_E, none_E, none_E, address_EF, np.arange(len(length_E)))
    order_E = np.argsort(row_E, kind="stable")
    order_E = order_E[length_E[order_E] > 0]
    end_E = np.cumsum(length_E[order_E])  # slots of all heads, counted head by head
    start_E = end_E - length_E[order_E]
    length_X = stored_lens(tables, len(moves.unit_X))
    bend_N = moves.slot_N + (np.cumsum(length_X) - length_X)[moves.row_N]
    start_P = np.union1d(start_E, bend_N)
    end_P = np.append(start_P[1:], end_E[-1:])
    within_P = np.searchsorted(start_E, start_P, side="right") - 1
    of_P = order_E[within_P]
    skip_P = (start_P - start_E[within_P]) % moves.unit_X[row_E[of_P]]
    begin_P = start_P - start_E[within_P] - skip_P
    last_E = np.full_like(length_E, -1)
    last_E[of_P] = np.arange(len(of_P))
    return Pieces(
        layer_E[of_P],
        head_E[of_P],
        end_P - start_P + skip_P,
        skip_P,
        moves.turn_N[np.searchsorted(bend_N, start_P, side="right") - 1],
        address_EF[of_P] + begin_P[:, None] * tables[0].places.stride_LF[layer_E[of_P]],
        last_E,
    )
