"""A prefill of few tokens, behind a stored prefix or of prompts that begin, for a kernel that runs all layers.

S sequences that share the prefix   N new tokens of all   L layers   H KV heads   D head dim   B blocks of slots
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfold.attend.amx_attention import ROOM_BYTES, panels_of, places_of, units_of
from kvfold.attend.amx_layout import SLOTS
from kvfold.attend.stored_parts import LENGTH, StoredParts
from kvfold.core import ModelSpec
from kvfold.pages.places import Ints

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]


class ExtendState(NamedTuple):
    """What models/amx_extend.py has beside the rows of a layer; most is what `attend_blocks` takes."""

    scale_L: Floats
    k_LHND: Floats  # of the new tokens
    v_LHND: Floats
    strides: Ints
    part_LSHP4: Ints
    place_3X: Ints
    shape: tuple[int, int, int, int, int, int]
    num_units: int
    lse_HR: Floats
    k_HBSD: Halves  # room
    v_HBDS: Halves

    def new(self, layer: int, tokens: slice) -> tuple[Tensor, Tensor]:
        """Keys and values of some of the new tokens, [H, T, D]."""
        k_HND, v_HND = (torch.from_numpy(x_LHND[layer]) for x_LHND in (self.k_LHND, self.v_LHND))
        return k_HND[:, tokens], v_HND[:, tokens]


def extend_state(
    spec: ModelSpec, lens: Sequence[int], layers: Sequence[StoredParts], num_stored: int
) -> ExtendState | None:
    """For sequences of which each has the same `num_stored` slots and so many new tokens; None where these are too many
    to be laid out at once."""
    first, num_layers, num_rows, count = spec.layers[0], len(layers), sum(lens), len(lens)
    num_heads, group, head_dim = first.num_kv_heads, first.group, first.head_dim
    slots_S = num_stored + np.array(lens)
    place_3X, num_shared = places_of(lens, slots_S, num_stored)
    num_blocks = int(place_3X[1, -1])
    if 4 * num_heads * num_blocks * SLOTS * head_dim > ROOM_BYTES:
        return None
    k_LHND, v_LHND = (torch.empty(num_layers, num_heads, num_rows, head_dim).numpy() for _ in range(2))
    most = max(stored.part_HP4.shape[1] for stored in layers)
    part_LSHP4 = np.zeros((num_layers, count, num_heads, most + 1, 4), dtype=np.int64)
    for layer, stored in enumerate(layers):
        part_LSHP4[layer, :, :, : stored.part_HP4.shape[1]] = stored.part_HP4
    row_LSH = np.arange(num_layers)[:, None, None] * num_heads + np.arange(num_heads)
    row_LSH = row_LSH * num_rows + place_3X[0, :-1, None]
    for side, x_LHND in enumerate((k_LHND, v_LHND)):
        part_LSHP4[..., most, side] = x_LHND.ctypes.data + 4 * head_dim * row_LSH
    part_LSHP4[..., most, LENGTH] = np.array(lens)[:, None]
    panels = panels_of(lens, num_heads, group)
    k_HBSD, v_HBDS = (
        torch.empty(num_heads, num_blocks, *shape, dtype=torch.uint16).numpy()
        for shape in ((SLOTS, head_dim), (head_dim, SLOTS))
    )
    between = [group * head_dim, head_dim, first.num_query_heads * head_dim]
    return ExtendState(
        np.array([layer.scale for layer in spec.layers], dtype=np.float32),
        k_LHND,
        v_LHND,
        np.array([*between, *between, head_dim, head_dim]),
        part_LSHP4,
        place_3X,
        (num_heads, group, num_shared, 1, head_dim, panels),
        units_of(lens, num_heads, group, panels),
        np.empty((num_heads, num_rows * group), dtype=np.float32),
        k_HBSD,
        v_HBDS,
    )
