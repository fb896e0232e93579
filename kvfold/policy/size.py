"""What a size means: a target for one sequence's compressible layers, as slots per head on average.

Protected slots, the open block and the observer state are inside the target. Relative sizes (`8x`, `12.5%mem`) follow
the committed length; absolute ones (`2048tok`, `512MB`) are bounds, which decoding has to hold too. Arithmetic is exact
(fractions): `2.3x` of 230 tokens is 100 slots, where binary division would round up to 101.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, NamedTuple

from kvfold.errors import InputError, PolicyError, SizeError

BYTE_UNITS = {
    "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
EXAMPLES = f"8x, 2048tok, 12.5%mem, 512MB ({', '.join(BYTE_UNITS)}), min(8x, 2048tok), max(8x, 512tok)"


def bytes_text(number: float) -> str:
    """23547840 -> 23.5 MB; units are decimal."""
    for unit in ("B", "kB", "MB"):
        if number < 999.5:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def parse_bytes(text: str | int) -> int:
    """4096, "4GB", "512 MiB"."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)?\s*", text)
    if match is None or (match[2] or "B") not in BYTE_UNITS:
        raise InputError(f'"{text}" is no amount of memory; write for example 4GB or 512MiB')
    return int(float(match[1]) * BYTE_UNITS[match[2] or "B"])


@dataclass(frozen=True)
class SizeFacts:
    """What the runner knows about one sequence when a size becomes a number."""

    num_tokens: int  # committed length at the end of the current extend
    num_heads: int  # KV heads, summed over the compressible layers
    bytes_per_slot: float  # one sealed slot of one head with positions and scales, averaged over heads
    overhead_bytes: int  # open block, observer state, page padding, tables
    open_len: int  # slots of the open block, per head
    full_bytes: int  # what the ordinary bf16 cache of the compressible layers holds at num_tokens

    def slots_in(self, num_bytes: Fraction | int) -> int:
        """Slots per head that fit into num_bytes; the open block is paid for in overhead_bytes."""
        per_slot = Fraction(self.bytes_per_slot) * self.num_heads
        return max(0, math.floor((num_bytes - self.overhead_bytes) / per_slot) + self.open_len)


class Size(ABC):
    """One of Ratio, Tokens, Share, Bytes, Least, Greatest; `str` gives the text of the expression."""

    @property
    @abstractmethod
    def is_absolute(self) -> bool:
        """Whether tokens or bytes occur anywhere in it: a bound that does not grow with the sequence."""

    @property
    def counts_bytes(self) -> bool:
        """Whether bytes occur anywhere in it, absolute or as a share."""
        return False

    @abstractmethod
    def slots_per_head(self, facts: SizeFacts) -> int:
        """The target, averaged over heads, protected slots and open block included."""


@dataclass(frozen=True)
class Ratio(Size):
    """`8x`: ceil(N / 8) slots per head."""

    times: float
    is_absolute = False

    def __post_init__(self) -> None:
        _require(self.times >= 1, self, "a ratio is at least 1x, and 8x keeps one slot in eight")

    def slots_per_head(self, facts: SizeFacts) -> int:
        return math.ceil(facts.num_tokens / exact(self.times))

    def __str__(self) -> str:
        return f"{number_text(self.times)}x"


@dataclass(frozen=True)
class Tokens(Size):
    """`2048tok`: so many slots per head."""

    count: int
    is_absolute = True

    def __post_init__(self) -> None:
        whole = exact(self.count).denominator == 1
        _require(whole and self.count >= 1, self, "a number of tokens is whole and at least 1, such as 2048tok")
        object.__setattr__(self, "count", int(self.count))

    def slots_per_head(self, facts: SizeFacts) -> int:
        return self.count

    def __str__(self) -> str:
        return f"{number_text(self.count)}tok"


@dataclass(frozen=True)
class Share(Size):
    """`12.5%mem`: of the bytes the ordinary bf16 cache would hold at this length."""

    percent: float
    is_absolute = False
    counts_bytes = True

    def __post_init__(self) -> None:
        _require(0 < self.percent <= 100, self, "a share is above 0%mem and at most 100%mem")

    def slots_per_head(self, facts: SizeFacts) -> int:
        return facts.slots_in(exact(self.percent) * facts.full_bytes / 100)

    def __str__(self) -> str:
        return f"{number_text(self.percent)}%mem"


@dataclass(frozen=True)
class Bytes(Size):
    """`512MB`: so many bytes for the whole sequence."""

    count: int
    is_absolute = True
    counts_bytes = True

    def __post_init__(self) -> None:
        _require(1 <= self.count < 10**18, self, "a size in bytes is at least 1B and below an exabyte")

    @classmethod
    def of(cls, amount: float, unit: str) -> Bytes:
        num_bytes = exact(amount) * BYTE_UNITS[unit]
        if num_bytes.denominator != 1:
            raise PolicyError(f"size {number_text(amount)}{unit}: a size in bytes is a whole number of bytes")
        return cls(int(num_bytes))

    def slots_per_head(self, facts: SizeFacts) -> int:
        return facts.slots_in(self.count)

    def __str__(self) -> str:
        """The shortest whole way to write it, so that 1024KB and 1.024MB are one size with one text."""
        whole = [f"{self.count // scale}{unit}" for unit, scale in BYTE_UNITS.items() if self.count % scale == 0]
        return min(whole, key=len)


@dataclass(frozen=True)
class _Several(Size):
    parts: tuple[Size, ...]
    word: ClassVar[str]

    def __post_init__(self) -> None:
        _require(len(self.parts) >= 2, self, "min and max take two sizes or more, such as min(8x, 2048tok)")

    @property
    def is_absolute(self) -> bool:
        return any(part.is_absolute for part in self.parts)

    @property
    def counts_bytes(self) -> bool:
        return any(part.counts_bytes for part in self.parts)

    def __str__(self) -> str:
        return f"{self.word}({', '.join(map(str, self.parts))})"


class Least(_Several):
    """`min(8x, 2048tok)`: the smallest of its parts."""

    word = "min"

    def slots_per_head(self, facts: SizeFacts) -> int:
        return min(part.slots_per_head(facts) for part in self.parts)


class Greatest(_Several):
    """`max(8x, 512tok)`: the largest of its parts."""

    word = "max"

    def slots_per_head(self, facts: SizeFacts) -> int:
        return max(part.slots_per_head(facts) for part in self.parts)


class Percent(NamedTuple):
    """`50%` as an argument: a share of the slots that a head keeps on average, the open block aside."""

    percent: float

    @property
    def share(self) -> Fraction:
        return exact(self.percent) / 100

    def of(self, slots_per_head: int) -> int:
        """Slots, rounded down."""
        return math.floor(self.share * slots_per_head)

    def __str__(self) -> str:
        return f"{number_text(self.percent)}%"


@dataclass(frozen=True)
class Floor:
    """What every head must be able to hold: protected slots and one open block. Recent slots are at least `recent`, and
    `share` of the slots that the size leaves beside the open block."""

    sinks: int
    recent: int
    open_len: int
    share: Percent | None = None

    @property
    def slots(self) -> int:
        """The smallest size of all that hold this."""
        return max(self.sinks + self.recent, self._slots_with_share) + self.open_len

    @property
    def _slots_with_share(self) -> int:
        """The fewest slots n whose share leaves room for the sinks: n - floor(share * n) >= sinks."""
        if self.share is None or not self.sinks:
            return self.sinks
        return math.floor((self.sinks - 1) / (1 - self.share.share)) + 1

    def __str__(self) -> str:
        counted = f"{self.recent}" if self.recent or self.share is None else ""
        recent = " or ".join(filter(None, (counted, str(self.share or ""))))
        return f"{self.sinks} sinks, {recent} recent, open block {self.open_len}"


def check_floor(slots: int, floor: Floor, size: Size, num_tokens: int) -> None:
    """Refuse a target that protected slots and open block do not fit into. A prompt within the floor is never cut,
    which an absolute size may not allow: it is a bound for prompts of every length."""
    if slots >= floor.slots or num_tokens <= (slots if size.is_absolute else floor.slots):
        return
    tenths = 10 * num_tokens // floor.slots  # rounded down, so that the ratio it names does fit
    ratio = f" ({number_text(tenths / 10)}x here)" if tenths >= 10 else ""
    raise SizeError(
        f"size {size} of {num_tokens} tokens is {slots} slots per head, below the {floor.slots} that must fit "
        f"({floor}); the smallest possible is {floor.slots}tok{ratio}"
    )


def exact(number: float) -> Fraction:
    """The decimal number as it was written, without the error of its binary form."""
    return Fraction(repr(number))


def number_text(number: float) -> str:
    """The shortest text that reads back as the same number, without a trailing `.0`."""
    return repr(number).removesuffix(".0")


def _require(holds: bool, size: Size, rule: str) -> None:
    if not holds:
        raise PolicyError(f"size {size}: {rule}")
