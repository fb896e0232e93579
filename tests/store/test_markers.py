"""Records of what was cached: they live in tiers like tensors, and are found while they wait to be written."""

from __future__ import annotations

from dataclasses import replace
from threading import Event
from time import time

from kvfold.store.markers import CacheMarkers, Marker
from kvfold.store.store import PrefixStore
from kvfold.store.tiers.host import HostTier
from kvfold.store.tiers.redis import RedisTier
from tests.store.common import BINDING, Clock
from tests.store.servers import RedisServer


def assert_set(going: Event) -> None:
    assert going.wait(60)


MARKER = Marker(40, bytes(range(32)))


def test_a_mark_lives_as_long_as_it_is_used(clock: Clock) -> None:
    with PrefixStore([HostTier(1 << 20, clock=clock)], clock=clock) as store:
        markers = CacheMarkers(store, BINDING)
        assert (markers.find(MARKER, clock.now), markers.miss_reason(MARKER)) == (None, "absent")
        markers.write(MARKER, 300.0, clock.now)
        store.flush()
        clock.now += 200
        markers.touch(MARKER, clock.now)
        store.flush()
        clock.now += 299
        assert markers.find(MARKER, clock.now) == 300
        clock.now += 300
        assert (markers.find(MARKER, clock.now), markers.miss_reason(MARKER)) == (None, "expired")
        markers.write(MARKER, 300.0, clock.now)
        markers.delete(MARKER)
        store.flush()
        assert markers.find(MARKER, clock.now) is None


def test_what_waits_to_be_written_is_found(clock: Clock) -> None:
    going = Event()
    with PrefixStore([HostTier(1 << 20, clock=clock)], clock=clock) as store:
        markers = CacheMarkers(store, BINDING)
        store.tiered._write_queue.submit(0, lambda: assert_set(going))
        markers.write(MARKER, 300.0, clock.now)
        try:
            assert markers.find(MARKER, clock.now + 299) == 300
            assert markers.find(MARKER, clock.now + 300) is None
            assert list(store.tiered.tiers[0].keys()) == []
        finally:
            going.set()
        store.flush()
        assert len(list(store.tiered.tiers[0].keys())) == 1
        assert store.tiered._pending == {}


def test_servers_that_share_a_redis_share_marks_of_one_tenant(redis_server: RedisServer) -> None:
    with PrefixStore([RedisTier(redis_server.url)]) as one, PrefixStore([RedisTier(redis_server.url)]) as other:
        CacheMarkers(one, BINDING).write(MARKER, 300.0, time())
        one.flush()
        assert CacheMarkers(other, BINDING).find(MARKER, time()) == 300
        assert CacheMarkers(other, replace(BINDING, tenant="else")).find(MARKER, time()) is None
        redis_server.kill()
        assert CacheMarkers(other, BINDING).find(MARKER, time()) is None
