"""A replica that hangs: its requests go to another one, and the proxy's own answers do not wait for it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from kvfold.serve.replicas import fleet, together
from tests.serve.asking import until
from tests.serve.replicas.proxied import Proxied, proxied

ALIKE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "alike"}]}


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxied]:
    """Two replicas, without health checks."""
    monkeypatch.setattr(fleet, "HEALTH_EVERY_S", 600.0)
    with proxied(2) as found:
        yield found


@contextmanager
def stopped(proxy: Proxied, number: int) -> Iterator[None]:
    os.kill(proxy.pids[number], signal.SIGSTOP)
    os.waitid(os.P_PID, proxy.pids[number], os.WSTOPPED | os.WNOWAIT)  # all of its threads have stopped
    try:
        yield
    finally:
        os.kill(proxy.pids[number], signal.SIGCONT)


def retries(proxy: Proxied) -> str:
    lines = proxy.call("GET", "/metrics").text.splitlines()
    return next(line for line in lines if line.startswith("kvfold_proxy_retries_total"))


def test_requests_of_a_replica_that_hangs_go_to_another_and_streams_end_with_an_error(proxy: Proxied) -> None:
    at = proxy.post(ALIKE).json["number"]
    stream = proxy.ask("POST", "/v1/messages", {**ALIKE, "do": "stream"})
    begun = stream.getresponse()
    assert begun.headers["x-kvfold-replica"] == str(at)
    assert begun.read(9) == b"data: 1\n\n"
    with stopped(proxy, at), ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(proxy.post, ALIKE)
        until(lambda: proxy.fleet.backends[at].num_in_flight == 2)
        proxy.give_up(at)
        assert waiting.result().json["number"] == 1 - at
        rest = begun.read().decode()
        assert proxy.post(ALIKE).json["number"] == 1 - at, "new requests go there at once"
    stream.close()
    assert rest.startswith("event: error\ndata: ")
    assert "ended or hangs" in json.loads(rest.rpartition("data: ")[2])["error"]["message"]
    assert retries(proxy) == "kvfold_proxy_retries_total 1"


def test_a_stream_without_an_event_is_sent_to_another(proxy: Proxied) -> None:
    """Its head has come."""
    at = proxy.post(ALIKE).json["number"]
    with ThreadPoolExecutor(1) as clients:
        waiting = clients.submit(proxy.post, {**ALIKE, "do": "stall_once", "at": at})
        until(lambda: any(one.has_answered for one in proxy.fleet.backends[at].upstreams))
        proxy.give_up(at)
        assert waiting.result().json["number"] == 1 - at


def test_metrics_and_health_do_not_wait_and_mark_what_is_missing(
    proxy: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: "\na_total 3\n" in proxy.call("GET", "/metrics").text)
    monkeypatch.setattr(together, "ASK_S", 0.5)
    with stopped(proxy, 0):
        text = proxy.call("GET", "/metrics").text
        assert "\na_total 3\n" in text, "with what it counted last"
        assert 'kvfold_replica_up{replica="0"} 1\n' in text
        assert 'kvfold_replica_answered{replica="0"} 0\n' in text
        health = proxy.call("GET", "/health")
        assert (health.status, health.json["status"], health.json["replicas"][0]) == (200, "ok", {"status": "silent"})
        proxy.give_up(0)
        until(lambda: not proxy.fleet.backends[0].is_up)
        health = proxy.call("GET", "/health")
        assert (health.status, health.json["status"], health.json["replicas"][0]) == (
            200,
            "degraded",
            {"status": "down"},
        )
        assert proxy.call("GET", "/ready").json["replicas_ready"] == 1
        proxy.give_up(1)
        until(lambda: not proxy.fleet.backends[1].is_up)
        assert "\na_total 3\n" in proxy.call("GET", "/metrics").text


def test_health_checks_find_a_replica_that_hangs_and_one_that_goes_on() -> None:
    with proxied(2) as proxy:
        at = proxy.post(ALIKE).json["number"]
        with stopped(proxy, at):
            assert proxy.post(ALIKE).json["number"] == 1 - at, "before it is killed"
        proxy.settle()
        assert proxy.post(ALIKE).json["number"] == at
        assert [replica.num_starts for replica in proxy.fleet.replicas] == [1, 1]
