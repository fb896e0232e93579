"""Redis: real servers that are killed, hang, are full, or come back; requests never notice more than a miss."""

from __future__ import annotations

import sys
import time
from functools import partial

import pytest
import torch

from kvfold.errors import InputError, MissingExtra
from kvfold.models.loader import Model
from kvfold.store import HostTier, PrefixStore, RedisTier
from kvfold.store.events import Event
from kvfold.store.tiers.eviction import Lease
from kvfold.store.tiers.redis import Breaker
from tests.store.common import CHUNK, Clock, cold_logits, finish, make_entry, make_key, make_prefixes
from tests.store.servers import RedisServer
from tests.tiny import prompt

TOKENS = prompt(3 * CHUNK + 5)


def quick(server: RedisServer, clock: Clock | None = None) -> RedisTier:
    """Gives up early; a breaker opens at the second failure and closes when its clock is set."""
    make = partial(Breaker, num_failures=2, pause_s=5, clock=clock or Clock())
    return RedisTier(server.url, timeout_s=0.2, make_breaker=make)


def put(tier: RedisTier, number: int, ttl_s: float = 300.0) -> bool:
    lease = Lease(time.time(), ttl_s, 1.0)
    return tier.put(make_key(number), make_entry(make_key(number), lease), lease)


def test_entries_expire_by_themselves_and_reading_makes_them_live_longer(redis_server: RedisServer) -> None:
    import redis

    client, tier, key = redis.Redis.from_url(redis_server.url), quick(redis_server), make_key(1)
    assert put(tier, 1, ttl_s=300)
    client.pexpire(f"kvfold:{key.text}", 1000)
    tier.touch(key, time.time() - 100)
    assert 190_000 < client.pttl(f"kvfold:{key.text}") <= 200_000
    assert tier.get(key, time.time()) is not None
    assert 290_000 < client.pttl(f"kvfold:{key.text}") <= 300_000
    tier.get(key, time.time() - 200)  # a request that started earlier takes nothing away
    assert client.pttl(f"kvfold:{key.text}") > 290_000
    client.pexpire(f"kvfold:{key.text}", 1)
    time.sleep(0.05)
    assert tier.get(key, time.time()) is None
    tier.close()
    client.close()


def test_a_killed_server_is_left_alone_and_found_again(redis_server: RedisServer) -> None:
    clock, events = Clock(), list[Event]()
    tier = quick(redis_server, clock)
    tier.events.subscribe(events.append)
    assert put(tier, 1)
    redis_server.kill()
    for _ in range(2):
        assert not any(breaker.is_open for breaker in tier.breakers.values())
        assert tier.get(make_key(1), 0.0) is None and not put(tier, 2)
    assert tier.breakers["read"].is_open and tier.breakers["write"].is_open
    assert tier.get(make_key(1), 0.0) is None and list(tier.keys()) == []
    redis_server.start()
    assert not put(tier, 3)  # the pause is not over
    clock.now += 6
    assert put(tier, 3) and not tier.breakers["write"].is_open and list(tier.keys()) == [make_key(3)]
    assert [(event.kind, event.reason) for event in events] == [
        ("stored", None), *[("failed", "unavailable")] * 3, ("stored", None)
    ]  # fmt: skip
    tier.close()


def test_a_server_that_hangs_costs_a_few_time_outs(redis_server: RedisServer) -> None:
    tier = quick(redis_server)
    assert put(tier, 1)
    redis_server.pause()
    began = time.monotonic()
    assert all(tier.get(make_key(1), 0.0) is None for _ in range(1000))
    assert tier.breakers["read"].is_open and time.monotonic() - began < 60  # a thousand time-outs would be 200 s
    redis_server.resume()
    tier.close()


def test_a_full_server_refuses_what_is_new_and_still_answers(redis_server: RedisServer) -> None:
    redis_server.kill()
    redis_server.start("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    tier, events = quick(redis_server), list[Event]()
    tier.events.subscribe(events.append)
    lease = Lease(time.time(), 300, 1.0)
    stored = [number for number in range(20) if tier.put(make_key(number), bytes(300_000), lease)]
    assert events[-1].reason == "no_room" and not tier.breakers["write"].is_open
    assert 0 < len(stored) < 20 and tier.get(make_key(stored[0]), 0.0) is not None
    tier.close()


def test_requests_are_answered_without_the_server(model: Model, redis_server: RedisServer) -> None:
    """Killed between requests, and empty when it is back: the tokens are those of a run without a store."""
    clock, cold = Clock(), cold_logits(model, TOKENS)
    tier = quick(redis_server, clock)
    with PrefixStore([tier], chunk_len=CHUNK) as store:
        prefixes, matched = make_prefixes(store, model), []
        for event in ("", "", "kill", "", "start", ""):
            if event:
                getattr(redis_server, event)()
                clock.now += 6
            hit = prefixes.lookup(TOKENS)
            matched.append(hit.matched_tokens)
            assert torch.equal(finish(model, hit, TOKENS), cold)
            prefixes.save(hit.sequence, TOKENS)
            hit.sequence.release()
            store.flush()
        assert matched == [0, 3 * CHUNK, 0, 0, 0, 3 * CHUNK]


def test_processes_share_what_one_has_stored(model: Model, redis_server: RedisServer) -> None:
    for expected in (0, 3 * CHUNK):
        with PrefixStore([HostTier(1 << 24), quick(redis_server)], chunk_len=CHUNK) as store:
            prefixes = make_prefixes(store, model)
            hit = prefixes.lookup(TOKENS)
            assert hit.matched_tokens == expected and hit.tier == ("redis" if expected else None)
            assert torch.equal(finish(model, hit, TOKENS), cold_logits(model, TOKENS))
            prefixes.save(hit.sequence, TOKENS)
            hit.sequence.release()


def test_no_address_is_refused() -> None:
    pytest.importorskip("redis")
    with pytest.raises(InputError, match="is no Redis URL"):
        RedisTier("http://localhost")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match=r"kvfold\[serve\]"):
        RedisTier("redis://localhost")
