"""All decoder layers of a short prefill in one call, on a CPU with AMX.

Its tokens stand behind a stored prefix, or begin prompts.

Some tens of rows are multiplied in less time than Python takes to call a layer's kernels. Sequences that share the
prefix run together, as do those that begin. What every row gives is what it gets layer by layer.

`room` is a Room (cpu_decoder.py), `state` an ExtendState (passes/cpu_extend.py).

    L layers   N rows, a multiple of 16   X heads and their channels   H KV heads   D head dim   P phases   C columns
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvfold.attend.amx_attention import attend_blocks
from kvfold.models.avx512_layer import NUM_PHASES, mlp, qkv, turn_row
from kvfold.pages.kernels.cpu_jit import address_of, compiled, done, take, wait

_QKV, _NEW, _LAID_OUT, _READ = range(4)  # phases; the others are those of the MLP


@compiled
def _prepare(phase: Any, layer: int, layer_C: Any, room: Any, angles: Any, state: Any) -> None:
    """Rows of queries, keys and values, and these to where attention reads them."""
    k_HND, v_HND = state.k_LHND[layer], state.v_LHND[layer]
    num_heads, num_rows, head_dim = k_HND.shape
    n = take(phase)
    while n < num_rows:
        turn_row(n, layer_C, room, angles)
        for h in range(num_heads):
            k_HND[h, n] = room.k_NX[n, h * head_dim : (h + 1) * head_dim]
            v_HND[h, n] = room.v_NX[n, h * head_dim : (h + 1) * head_dim]
        done(phase)
        n = take(phase)
    wait(phase, num_rows)


@compiled
def extend(phase_PX: Any, layer_LC: Any, epsilon_L2: Any, room: Any, angles: Any, state: Any) -> None:
    """x becomes the output of the last layer."""
    addresses = np.array([address_of(room.q_NX), address_of(room.attended_NX)])
    for layer in range(len(layer_LC)):
        mine_PX = phase_PX[NUM_PHASES * layer : NUM_PHASES * (layer + 1)]
        qkv(mine_PX[_QKV], layer_LC[layer], epsilon_L2[layer, 0], room)
        _prepare(mine_PX[_NEW], layer, layer_LC[layer], room, angles, state)
        attend_blocks(
            addresses,
            state.strides,
            state.part_LSHP4[layer],
            state.place_3X,
            state.shape,
            state.scale_L[layer : layer + 1],
            state.lse_HR,
            state.k_HBSD,
            state.v_HBDS,
            mine_PX[_LAID_OUT : _READ + 1],
        )
        wait(mine_PX[_READ], state.num_units)
        mlp(mine_PX, layer_LC[layer], epsilon_L2[layer, 1], room)
