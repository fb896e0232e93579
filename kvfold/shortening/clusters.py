"""Clusters of units by their vectors: spherical k-means without chance, alike on every machine."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from kvfold.shortening.embedders.codes import cosines, encode_unit

Codes = NDArray[np.int8]
_ROUNDS = 20  # at most


def clusters(codes: Codes, count: int | None = None) -> tuple[NDArray[np.int64], Codes]:
    """Spherical k-means from units that are far from each other: the label of each unit, and the means.

    Without a count there are sqrt(units / 2) clusters.
    """
    centres = codes[_far_apart(codes, count or max(1, round(math.sqrt(len(codes) / 2))))]
    label = cosines(codes, centres).argmax(1)
    for _ in range(_ROUNDS):
        is_member = np.equal.outer(np.arange(len(centres)), label)
        total = is_member.astype(np.float32) @ codes.astype(np.float32)  # whole numbers, exact below 2**24
        centres = encode_unit(total.astype(np.float64))
        before, label = label, cosines(codes, centres).argmax(1)
        if np.array_equal(label, before):
            break
    return label, centres


def _far_apart(codes: Codes, count: int) -> list[int]:
    """The unit nearest to the mean, then always the one farthest from those taken."""
    mean = encode_unit(codes.sum(0, dtype=np.float64)[None])
    taken = [int(cosines(codes, mean)[:, 0].argmax())]
    nearest = cosines(codes, codes[taken])[:, 0]
    while len(taken) < count:
        taken.append(int(nearest.argmin()))
        nearest = np.maximum(nearest, cosines(codes, codes[taken[-1:]])[:, 0])
    return taken
