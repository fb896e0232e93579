"""The evictor against a plain list: limits, times to live, and what goes first."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvfold.store.key import Key
from kvfold.store.tiers.eviction import Evictor, Lease
from tests.store.common import CHUNK, make_key

LIMIT = 100
numbers = st.integers(0, 12)


@dataclass
class Plain:
    num_bytes: int
    ttl_s: float
    saved_s: float
    expires_at: float
    used_at: float

    def rank(self, key: Key) -> tuple[float, float, int, str]:
        worth = round(log2(self.saved_s / self.num_bytes)) if self.saved_s else -1000
        return worth, self.used_at, -key.end, key.text


class LedgerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.evictor = Evictor(LIMIT)
        self.plain: dict[Key, Plain] = {}
        self.now = 0.0

    @rule(number=numbers, size=st.integers(1, 70), ttl=st.integers(1, 9), saved=numbers, ago=st.integers(0, 3))
    def put(self, number: int, size: int, ttl: int, saved: int, ago: int) -> None:
        key = make_key(number, end=CHUNK * (1 + number % 3))
        self._sweep()
        self.evictor.remove(key)
        self.plain.pop(key, None)
        gone = self.evictor.victims(size)
        assert gone == self._expected_victims(size)
        for other in gone:
            self.evictor.remove(other)
            del self.plain[other]
        lease = Lease(self.now - ago, ttl, saved)
        self.evictor.add(key, size, lease)
        self.plain[key] = Plain(size, ttl, saved, lease.expires_at, lease.at)

    def _sweep(self) -> None:
        gone = self.evictor.expired(self.now)
        assert set(gone) == {key for key, entry in self.plain.items() if entry.expires_at <= self.now}
        for key in gone:
            self.evictor.remove(key)
            del self.plain[key]

    def _expected_victims(self, size: int) -> list[Key]:
        order = sorted(self.plain, key=lambda key: self.plain[key].rank(key))
        gone: list[Key] = []
        while sum(entry.num_bytes for key, entry in self.plain.items() if key not in gone) + size > LIMIT:
            gone.append(order[len(gone)])
        return gone

    @rule(number=numbers, ago=st.integers(0, 3))
    def touch(self, number: int, ago: int) -> None:
        key = make_key(number, end=CHUNK * (1 + number % 3))
        if key in self.plain:
            entry, at = self.plain[key], self.now - ago
            entry.used_at = max(entry.used_at, at)
            entry.expires_at = max(entry.expires_at, at + entry.ttl_s)
            assert self.evictor.touch(key, at).expires_at == entry.expires_at

    @rule(number=numbers)
    def remove(self, number: int) -> None:
        key = make_key(number, end=CHUNK * (1 + number % 3))
        self.evictor.remove(key)
        self.plain.pop(key, None)

    @rule(seconds=st.integers(0, 4))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def same(self) -> None:
        assert set(self.evictor) == set(self.plain)
        assert self.evictor.total_bytes == sum(entry.num_bytes for entry in self.plain.values()) <= LIMIT
        for key, entry in self.plain.items():
            assert self.evictor.is_live(key, self.now) == (entry.expires_at > self.now)
        least = min(self.plain, key=lambda key: self.plain[key].rank(key), default=None)
        assert self.evictor.least_valuable() == least


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_heaps_do_not_grow_with_use() -> None:
    evictor, key = Evictor(LIMIT), make_key(0)
    evictor.add(key, 1, Lease(0.0, 1.0, 1.0))
    for at in range(10_000):
        evictor.touch(key, float(at))
    assert len(evictor._by_worth) + len(evictor._by_expiry) < 300
    assert evictor.expired(10_000.0) == [key]


def test_a_short_entry_in_use_stays_before_a_long_one_nobody_uses() -> None:
    """Seconds per byte differ a little: every entry has a header."""
    evictor, short, long = Evictor(200), make_key(0), make_key(1)
    evictor.add(long, 101, Lease(0.0, 9.0, 100.0))
    evictor.add(short, 11, Lease(1.0, 9.0, 10.0))
    assert evictor.least_valuable() == long


def test_of_one_prompt_the_last_chunk_goes_first() -> None:
    evictor = Evictor(3)
    keys = [make_key(i, end=CHUNK * (i + 1)) for i in range(3)]
    for key in keys:
        evictor.add(key, 1, Lease(0.0, 9.0, 1.0))
    assert evictor.victims(2) == [keys[2], keys[1]]
