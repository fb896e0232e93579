"""Unit vectors as 8-bit integers: products of two are exact in fp32, so results do not depend on machine or threads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SCALE = 127


def encode_unit(rows_ND: NDArray[np.floating] | NDArray[np.integer]) -> NDArray[np.int8]:
    """Rows scaled to length 1, times 127, rounded; rows of zeros stay so. Of integers the same on every machine: their
    squares add up exactly, in whichever order."""
    squares_N = np.einsum("nd,nd->n", rows_ND, rows_ND)
    length_N1 = np.sqrt(np.where(squares_N > 0, squares_N, 1.0))[:, None]
    return np.rint(rows_ND / length_N1 * SCALE).astype(np.int8)


def cosines(a_ND: NDArray[np.int8], b_MD: NDArray[np.int8]) -> NDArray[np.float64]:
    """[N, M]: cosines of two sets of codes."""
    products = a_ND.astype(np.float32) @ b_MD.astype(np.float32).T  # whole numbers below 2**24 up to 1040 dimensions
    return products.astype(np.float64) / SCALE**2
