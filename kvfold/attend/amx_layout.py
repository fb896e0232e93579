"""How AMX tiles read queries, keys and values of attention (amx_attention.py): as bf16.

Slots lie in blocks from slot 0 on, zeros behind the last one: keys [slot, channel], values [channel, slot]. 16 queries
are a pair panel (pages/kernels/amx.py).

    D head dim   S slots of a block   P parts of a head's slots, one behind the other
"""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from kvfold.attend.stored_parts import IS_BF16, LENGTH
from kvfold.pages.kernels.amx import DEPTH, pairs_of
from kvfold.pages.kernels.avx512 import LANES, at, emitted, index, load, loop, pointer, store, transposed
from kvfold.pages.kernels.cpu_jit import compiled

SLOTS = 128  # of a block

_HALVES, _WHOLE = ir.VectorType(ir.IntType(16), LANES), ir.VectorType(ir.IntType(32), LANES)


def further(builder: Any, address: Any, number: Any, size: int) -> Any:
    """The place so many pieces of so many bytes behind an address."""
    return pointer(builder, builder.add(address, builder.mul(number, index(size))))


def _emit_slot(is_bf16: bool, builder: Any, source: Any, target: Any, head_dim: Any) -> None:
    """A slot as bf16."""
    target = pointer(builder, target)

    def copy(channel: Any, _: Any) -> list[Any]:
        place = further(builder, source, channel, 2 if is_bf16 else 4)
        found = load(builder, place)
        if not is_bf16:
            found = pairs_of(builder, found, load(builder, at(builder, place, index(LANES))))
        store(builder, found, at(builder, target, builder.lshr(channel, index(1))))
        return []

    loop(builder, index(0), head_dim, DEPTH, [], copy)


def _emit_turned(builder: Any, v: Any, target: Any, head_dim: Any) -> None:
    """16 slots of bf16 values, [slot, channel], as columns of [channel, slot]."""
    row_bytes = builder.shl(head_dim, index(1))

    def turn(channel: Any, _: Any) -> list[Any]:
        first = builder.add(v, builder.shl(channel, index(1)))
        rows = [
            load(builder, pointer(builder, builder.add(first, builder.mul(index(slot), row_bytes))))
            for slot in range(LANES)
        ]
        place = builder.add(target, builder.mul(channel, index(2 * SLOTS)))
        for i, pairs in enumerate(transposed(builder, rows)):
            bits = builder.bitcast(pairs, _WHOLE)
            for side in range(2):
                half = builder.trunc(builder.lshr(bits, ir.Constant(_WHOLE, [16 * side] * LANES)), _HALVES)
                store_at = builder.add(place, index(2 * SLOTS * (2 * i + side)))
                builder.store(half, builder.inttoptr(store_at, _HALVES.as_pointer()), align=2)
        return []

    loop(builder, index(0), head_dim, DEPTH, [], turn)


def _emit_queries(builder: Any, rows: Any, panel: Any, head_dim: Any) -> None:
    """16 rows of fp32 as a pair panel; `rows`: where their addresses are."""
    addresses = builder.inttoptr(rows, index(0).type.as_pointer())
    places = [pointer(builder, builder.load(builder.gep(addresses, [index(i)]))) for i in range(LANES)]
    target = pointer(builder, panel)

    def pack(channel: Any, _: Any) -> list[Any]:
        found = []
        for place in places:
            low, high = (load(builder, at(builder, place, builder.add(channel, index(i)))) for i in (0, LANES))
            found.append(pairs_of(builder, low, high))
        for i, pairs in enumerate(transposed(builder, found)):
            pair = builder.add(builder.lshr(channel, index(1)), index(i))
            store(builder, pairs, at(builder, target, pair, index(LANES)))
        return []

    loop(builder, index(0), head_dim, DEPTH, [], pack)


_narrow_slot, _copy_slot = emitted(partial(_emit_slot, False)), emitted(partial(_emit_slot, True))
_turned, pack_queries = emitted(_emit_turned), emitted(_emit_queries)


@compiled
def lay_out(part_P4: Any, begin: int, count: int, strides: Any, k_SD: Any, v_DS: Any, room_SD: Any) -> None:
    """A block of slots, from slot `begin` of a head on."""
    part, skip, filled, head_dim = 0, begin, 0, k_SD.shape[1]
    while skip >= part_P4[part, LENGTH]:
        skip -= part_P4[part, LENGTH]
        part += 1
    while filled < count:
        taken, is_bf16 = min(part_P4[part, LENGTH] - skip, count - filled), part_P4[part, IS_BF16]
        for side in range(2):
            size = 2 if is_bf16 else 4
            source = part_P4[part, side] + skip * strides[side] * size
            target = (room_SD if side else k_SD).ctypes.data + 2 * filled * head_dim
            for slot in range(taken):
                row = source + slot * strides[side] * size, target + 2 * slot * head_dim, head_dim
                if is_bf16:
                    _copy_slot(row)
                else:
                    _narrow_slot(row)
        part, skip, filled = part + 1, 0, filled + taken
    whole = -(-filled // DEPTH) * DEPTH
    k_SD[filled:whole] = 0
    room_SD[filled:whole] = 0
    for slot in range(0, whole, LANES):
        _turned((room_SD.ctypes.data + 2 * slot * head_dim, v_DS.ctypes.data + 2 * slot, head_dim))
