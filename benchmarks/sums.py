"""Running sums: worked examples of them, and whether a line ends with the right one."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import accumulate

_RESULT = re.compile(r"=\s*(-?\d+)\s*$")


def worked(numbers: Sequence[int]) -> str:
    """Numbers and their running sums, as an example shows them."""
    sums = list(accumulate(numbers))
    lines = [
        f"{before} + {number} = {after}" for before, number, after in zip(sums, numbers[1:], sums[1:], strict=False)
    ]
    return "\n".join([f"Numbers: {', '.join(map(str, numbers))}", *lines, ""])


def prompt(numbers: Sequence[int]) -> str:
    shown = worked([7, 5, 8, 3, 6]) + "\n" + worked([4, 9, 2, 8, 5])
    return f"Add the numbers one at a time.\n\n{shown}\n{worked(numbers).splitlines()[0]}\n"


def result_is(expected: int) -> Callable[[str], bool]:
    return lambda text: (found := _RESULT.search(text)) is not None and int(found[1]) == expected
