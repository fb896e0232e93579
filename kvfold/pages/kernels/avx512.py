"""LLVM IR of AVX-512 tiles for numba: 16 rows are the 16 lanes of a register, and a number is multiplied with all.

An autovectorizer does not write this: it takes registers of 8 lanes where Intel's guide says so, and sums in lanes. A
*panel* holds 16 rows, column after column, so that a column is one register:

    sums[output, 16 rows] += panel[k, 16 rows] * weight[output, k]        k = 0, 1, 2, …

A row's sums run over k in order, whatever stands beside it, so a row gives the same bits among any number of rows.
Addresses are bytes, sizes and strides fp32 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
OUTPUTS = 8  # of a tile: with three panels its sums fill 24 of the 32 registers
MOST_PANELS = 3

_INDEX, _LANE, _FLOAT = ir.IntType(64), ir.IntType(32), ir.FloatType()
_ROW, _WHOLE = ir.VectorType(_FLOAT, LANES), ir.VectorType(_LANE, LANES)
_UNDEFINED = ir.Constant(_ROW, ir.Undefined)


def index(number: int) -> Any:
    return ir.Constant(_INDEX, number)


def everywhere(number: float) -> Any:
    """A number in all lanes."""
    return ir.Constant(_ROW, [number] * LANES)


def _lanes(numbers: Sequence[int]) -> Any:
    return ir.Constant(ir.VectorType(_LANE, len(numbers)), list(numbers))


_FIRST = _lanes([0] * LANES)
_LOW, _HIGH = (_lanes([lane for i in range(at, at + 8) for lane in (i, LANES + i)]) for at in (0, 8))

_DISTANCES = 1, 2, 4, 8  # between lanes
_REVERSED = [int(f"{i:04b}"[::-1], 2) for i in range(LANES)]  # the bits of a number backwards


def pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _FLOAT.as_pointer())


def at(builder: Any, base: Any, number: Any, stride: Any = None) -> Any:
    """The place of an element."""
    return builder.gep(base, [number if stride is None else builder.mul(number, stride)])


def load(builder: Any, place: Any) -> Any:
    return builder.load(builder.bitcast(place, _ROW.as_pointer()), align=4)


def load_bf16(builder: Any, place: Any) -> Any:
    """The same of bf16 numbers."""
    halves = builder.load(builder.bitcast(place, ir.VectorType(ir.IntType(16), LANES).as_pointer()), align=2)
    bits = builder.shl(builder.zext(halves, _WHOLE), ir.Constant(_WHOLE, [16] * LANES))
    return builder.bitcast(bits, _ROW)


def store(builder: Any, row: Any, place: Any) -> None:
    builder.store(row, builder.bitcast(place, row.type.as_pointer()), align=4)


def prefetch(builder: Any, place: Any) -> None:
    """Ask for its cache line."""
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _LANE, _LANE, _LANE])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    kinds = [ir.Constant(_LANE, number) for number in (0, 3, 1)]  # to read, to keep, data
    builder.call(function, [builder.bitcast(place, cgutils.voidptr_t), *kinds])


def spread(builder: Any, number: Any) -> Any:
    """A number in all lanes."""
    first = builder.insert_element(_UNDEFINED, number, ir.Constant(_LANE, 0))
    return builder.shuffle_vector(first, _UNDEFINED, _FIRST)


def fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    kind = ir.FunctionType(_ROW, [_ROW] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32"), [a, b, c])


def transposed(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """Registers whose lanes, one register after another, are the columns of `rows`, of which there are 2, 4, 8 or 16:
    each perfect shuffle turns the bits of (row, lane) by one."""
    found, half = list(rows), len(rows) // 2
    for _ in range(half.bit_length()):
        pairs = zip(found[:half], found[half:], strict=True)
        found = [builder.shuffle_vector(a, b, lanes) for a, b in pairs for lanes in (_LOW, _HIGH)]
    return found


def lane_sums(builder: Any, rows: Sequence[Any]) -> Any:
    """One register with the sum over the lanes of each of 16."""
    found = [rows[i] for i in _REVERSED]
    while len(found) > 1:
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [
            builder.fadd(builder.shuffle_vector(a, b, _LOW), builder.shuffle_vector(a, b, _HIGH)) for a, b in pairs
        ]
    return found[0]


def _swapped(builder: Any, row: Any, distance: int) -> Any:
    """Each lane has the number of the one so far from it, to the right or to the left."""
    return builder.shuffle_vector(row, _UNDEFINED, _lanes([lane ^ distance for lane in range(LANES)]))


def in_all_lanes(builder: Any, row: Any, joined: Callable[[Any, Any], Any]) -> Any:
    """What all lanes come to, two at a time: `joined` of two registers."""
    for distance in _DISTANCES:
        row = joined(row, _swapped(builder, row, distance))
    return row


def store_columns(builder: Any, columns: Sequence[Any], places: Sequence[Any]) -> None:
    """OUTPUTS columns of a panel to 16 rows."""
    pairs = transposed(builder, columns)
    for i, place in enumerate(places):
        both, first = pairs[OUTPUTS * i // LANES], OUTPUTS * i % LANES  # this row and its neighbour
        row = builder.shuffle_vector(both, _UNDEFINED, _lanes(range(first, first + OUTPUTS)))
        store(builder, row, place)


def loop(
    builder: Any, begin: Any, end: Any, step: int, values: Sequence[Any], body: Callable[[Any, Any], Any]
) -> list[Any]:
    """Values after `for i in range(begin, end, step): values = body(i, values)`."""
    before = builder.block
    head, inside, behind = (builder.append_basic_block(name) for name in ("head", "inside", "behind"))
    builder.branch(head)
    builder.position_at_end(head)
    i, now = builder.phi(_INDEX), [builder.phi(value.type) for value in values]
    for phi, first in zip((i, *now), (begin, *values), strict=True):
        phi.add_incoming(first, before)
    builder.cbranch(builder.icmp_signed("<", i, end), inside, behind)
    builder.position_at_end(inside)
    then = body(i, now)
    for phi, following in zip((i, *now), (builder.add(i, index(step)), *then), strict=True):
        phi.add_incoming(following, builder.block)
    builder.branch(head)
    builder.position_at_end(behind)
    return now


class Tile:
    """OUTPUTS outputs of some panels. Sums [output, panel] stay in registers over the whole of k.

    `weights`: of each output, where its first weight is; the next ones are `stride` apart. `ahead`: rows that come from
    memory meanwhile, a cache line for 16 of k."""

    def __init__(
        self, builder: Any, panels: Sequence[Any], weights: Sequence[Any], stride: Any, ahead: Sequence[Any] = ()
    ) -> None:
        self.builder, self.panels, self.weights = builder, panels, weights
        self.stride, self.ahead = stride, ahead

    def run(self, size: Any, sums: Sequence[Any]) -> list[Any]:
        whole = self.builder.and_(size, index(-LANES))
        sums = loop(self.builder, index(0), whole, LANES, sums, self._line)
        return loop(self.builder, whole, size, 1, sums, self._add)

    def _line(self, k: Any, sums: Sequence[Any]) -> Sequence[Any]:
        """16 of k."""
        self._prefetch(k)
        for i in range(LANES):
            sums = self._add(self.builder.add(k, index(i)), sums)
        return sums

    def _add(self, k: Any, sums: Sequence[Any]) -> list[Any]:
        """Sums with the products of one k."""
        builder, found = self.builder, []
        columns = [load(builder, at(builder, panel, k, index(LANES))) for panel in self.panels]
        for output, weight in enumerate(self.weights):
            factor = spread(builder, builder.load(at(builder, weight, k, self.stride), align=4))
            mine = sums[output * len(columns) : (output + 1) * len(columns)]
            found += [fma(builder, x, factor, sum_) for x, sum_ in zip(columns, mine, strict=True)]
        return found

    def _prefetch(self, k: Any) -> None:
        for row in self.ahead:
            prefetch(self.builder, at(self.builder, row, k))


LOG2E, _LN2_HIGH, _LN2_LOW = 1.44269504088896341, 0.693359375, -2.12194440e-4
# (e**r - 1 - r) / r**2 for |r| up to ln(2) / 2, interpolated at Chebyshev nodes: e**r is right to 1e-8.
_POLYNOMIAL = (0.0013933652487, 0.0083631815447, 0.041666464895, 0.16666576967, 0.50000000135)
_LEAST = -87.0  # whose exponential is a normal number
_WHOLE_BITS = 12582912.0  # 1.5 * 2**23: a sum with it has the rounded number in its lowest bits


def exponential(builder: Any, x: Any) -> Any:
    """e**x for x up to 0, as 2**n * e**r; 0 below -87, and NaN stays."""
    return exponentials(builder, [x])[0]


def exponentials(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """The same of some registers, step by step side by side: one alone waits for each of its steps."""
    bits, zero = everywhere(_WHOLE_BITS), ir.Constant(_WHOLE, [0] * LANES)
    # Normal numbers, or NaN; what the others come to does not count.
    are_normal = [builder.fcmp_unordered(">=", x, everywhere(_LEAST)) for x in rows]
    shifted = [fma(builder, x, everywhere(LOG2E), bits) for x in rows]
    n = [builder.fsub(x, bits) for x in shifted]
    r = [fma(builder, a, everywhere(-_LN2_HIGH), x) for a, x in zip(n, rows, strict=True)]
    r = [fma(builder, a, everywhere(-_LN2_LOW), x) for a, x in zip(n, r, strict=True)]
    y = [everywhere(_POLYNOMIAL[0])] * len(rows)
    for factor in (*_POLYNOMIAL[1:], 1.0, 1.0):
        y = [fma(builder, a, x, everywhere(factor)) for a, x in zip(y, r, strict=True)]
    powers = [builder.shl(builder.bitcast(x, _WHOLE), ir.Constant(_WHOLE, [23] * LANES)) for x in shifted]
    sums = [builder.add(builder.bitcast(a, _WHOLE), power) for a, power in zip(y, powers, strict=True)]
    return [builder.bitcast(builder.select(*pair, zero), _ROW) for pair in zip(are_normal, sums, strict=True)]


# 2**r for r in [0, 1], right to 1e-7; 2**0 is 1.
_POWER_OF_2 = (0.0018671303013, 0.0090170296783, 0.055799913738, 0.2401644499, 0.69315131184, 1.0)
_ROUND_DOWN, _NO_ERRORS, _AS_IS = 1, 8, 4  # of AVX-512: how it rounds, and whether it does


def powers_of_2(builder: Any, rows: Sequence[Any]) -> list[Any]:
    """2**x; NaN stays."""
    mask, kind = ir.IntType(16), ir.FunctionType(_ROW, [_ROW, _LANE, _ROW, ir.IntType(16), _LANE])
    reduce = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.reduce.ps.512")
    kind = ir.FunctionType(_ROW, [_ROW] * 3 + [mask, _LANE])
    scale = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.mask.scalef.ps.512")
    every = ir.Constant(mask, -1)
    r = [builder.call(reduce, [x, _LANE(_ROUND_DOWN), x, every, _LANE(_NO_ERRORS)]) for x in rows]
    y = [everywhere(_POWER_OF_2[0])] * len(rows)
    for factor in _POWER_OF_2[1:]:
        y = [fma(builder, a, x, everywhere(factor)) for a, x in zip(y, r, strict=True)]
    return [builder.call(scale, [a, x, a, every, _LANE(_AS_IS)]) for a, x in zip(y, rows, strict=True)]


def gated(builder: Any, gates: Sequence[Any], ups: Sequence[Any]) -> list[Any]:
    """silu(gate) * up of some registers."""
    one = everywhere(1.0)
    small = powers_of_2(builder, [builder.fmul(x, everywhere(-LOG2E)) for x in gates])
    shares = [builder.fdiv(x, builder.fadd(one, y)) for x, y in zip(gates, small, strict=True)]
    return [builder.fmul(*pair) for pair in zip(shares, ups, strict=True)]


def emitted(emit: Callable[..., None]) -> Any:
    """A function for compiled code, called with a tuple of integers, that `emit(builder, *integers)` writes."""

    @intrinsic
    def call(_context: Any, arguments: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            emit(builder, *cgutils.unpack_tuple(builder, values[0]))
            return context.get_dummy_value()

        return types.void(arguments), generate

    return call


def _emit_butterflies(builder: Any, x: Any, count: Any) -> None:
    """Hadamard sums and differences within each 16 of `count` numbers: of neighbours, of those 2, 4 and 8 apart."""
    x = pointer(builder, x)

    def add(i: Any, _: Any) -> list[Any]:
        place = at(builder, x, i)
        row = load(builder, place)
        for distance in _DISTANCES:
            sign = ir.Constant(_ROW, [-1.0 if lane & distance else 1.0 for lane in range(LANES)])
            row = builder.fadd(_swapped(builder, row, distance), builder.fmul(row, sign))
        store(builder, row, place)
        return []

    loop(builder, index(0), count, LANES, [], add)


butterflies = emitted(_emit_butterflies)


def emit_pack(builder: Any, rows: Any, column: Any, panel: Any) -> None:
    """16 columns of 16 rows, from a column on, to a panel; `rows`: where the addresses of the rows are."""
    addresses = builder.inttoptr(rows, _INDEX.as_pointer())
    places = (pointer(builder, builder.load(builder.gep(addresses, [index(i)]))) for i in range(LANES))
    found = [load(builder, at(builder, place, column)) for place in places]
    target = at(builder, pointer(builder, panel), column, index(LANES))
    for i, values in enumerate(transposed(builder, found)):
        store(builder, values, at(builder, target, index(LANES * i)))


pack_square = emitted(emit_pack)
