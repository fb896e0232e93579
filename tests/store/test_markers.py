"""Records of what was cached: they live in tiers like tensors, and are found while they wait to be written."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from time import time

import pytest

from kvfold.store.markers import Marks, Spot
from kvfold.store.store import PrefixStore
from kvfold.store.tiers.host import HostTier
from kvfold.store.tiers.redis import RedisTier
from tests.store.common import BINDING, Clock
from tests.store.servers import RedisServer


def assert_set(going: Event) -> None:
    assert going.wait(60)


SPOT = Spot(40, bytes(range(32)))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_mark_lives_as_long_as_it_is_used(clock: Clock) -> None:
    with PrefixStore([HostTier(1 << 20, clock=clock)], clock=clock) as store:
        marks = Marks(store, BINDING)
        assert (marks.find(SPOT, clock.now), marks.why(SPOT)) == (None, "absent")
        marks.write(SPOT, 300.0, clock.now)
        store.flush()
        clock.now += 200
        marks.use(SPOT, clock.now)
        store.flush()
        clock.now += 299
        assert marks.find(SPOT, clock.now) == 300
        clock.now += 300
        assert (marks.find(SPOT, clock.now), marks.why(SPOT)) == (None, "expired")
        marks.write(SPOT, 300.0, clock.now)
        marks.forget(SPOT)
        store.flush()
        assert marks.find(SPOT, clock.now) is None


def test_what_waits_to_be_written_is_found(clock: Clock) -> None:
    going = Event()
    with PrefixStore([HostTier(1 << 20, clock=clock)], clock=clock) as store:
        marks = Marks(store, BINDING)
        store.cascade._writer.submit(0, lambda: assert_set(going))
        marks.write(SPOT, 300.0, clock.now)
        try:
            assert marks.find(SPOT, clock.now + 299) == 300
            assert marks.find(SPOT, clock.now + 300) is None
            assert list(store.cascade.tiers[0].keys()) == []
        finally:
            going.set()
        store.flush()
        assert len(list(store.cascade.tiers[0].keys())) == 1
        assert store.cascade._pending == {}


def test_servers_that_share_a_redis_share_marks_of_one_tenant(redis_server: RedisServer) -> None:
    with PrefixStore([RedisTier(redis_server.url)]) as one, PrefixStore([RedisTier(redis_server.url)]) as other:
        Marks(one, BINDING).write(SPOT, 300.0, time())
        one.flush()
        assert Marks(other, BINDING).find(SPOT, time()) == 300
        assert Marks(other, replace(BINDING, tenant="else")).find(SPOT, time()) is None
        redis_server.kill()
        assert Marks(other, BINDING).find(SPOT, time()) is None
