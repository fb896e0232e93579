"""Two speeds: `make test` runs the first cases of a large matrix, `make test-all` all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

thorough = pytest.mark.thorough


def first(count: int, cases: Iterable[Any]) -> list[Any]:
    """The cases, those behind the first `count` marked `thorough`; a tuple is one case of several arguments."""
    found = list(cases)
    rest = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=thorough) for case in found[count:]]
    return [*found[:count], *rest]
