"""A store in host memory whose clock tests set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvfold.store import HostTier, PrefixStore
from tests.store.common import CHUNK, Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[PrefixStore]:
    with PrefixStore([HostTier(1 << 24, clock=clock)], chunk_len=CHUNK, clock=clock) as made:
        yield made
