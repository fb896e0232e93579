"""A server ends when it is told to, whatever it is doing: real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from threading import Timer
from typing import Any

import pytest

from tests.serve.asking import until
from tests.serve.ending import Zygote, zygote

HELLO: Any = [{"role": "user", "content": "the cat sat on the mat"}]
ASKED: Any = {"model": "tiny", "max_tokens": 900, "messages": HELLO}
MARKED: Any = [{"type": "text", "text": "the cat sat " * 9, "cache_control": {"type": "ephemeral"}}]
HANGS_S = 60.0  # after which a server that does not end is killed, and the test fails


@pytest.fixture(scope="module")
def starting() -> Iterator[Zygote]:
    with zygote() as found:
        yield found


def ask(port: int, path: str = "/v1/messages", body: Any = None) -> HTTPConnection:
    """A request that is sent and not read."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, {"content-type": "application/json"})
    return connection


def status_of(port: int, path: str, body: Any = None) -> int:
    connection = ask(port, path, body)
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def is_busy(port: int) -> bool:
    connection = ask(port, "/health")
    found = json.load(connection.getresponse())
    connection.close()
    return bool(found["running"] + found["waiting"])


def ended(starting: Zygote, process: int, *signals: int) -> int:
    """The exit code after the signals."""
    for number in signals:
        os.kill(process, number)
    killer = Timer(HANGS_S, os.kill, (process, signal.SIGKILL))
    killer.start()
    try:
        return starting.exit_code()
    finally:
        killer.cancel()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_that_is_idle_ends_with_0(starting: Zygote, number: int) -> None:
    process, port = starting.start("nothing")
    assert status_of(port, "/ready") == 200
    assert ended(starting, process, number) == 0


@pytest.mark.parametrize(
    ("wrong", "body"), [("prefill", ASKED), ("lookup", {**ASKED, "system": MARKED})], ids=["prefill", "lookup"]
)
def test_one_that_is_stuck_is_not_waited_for(starting: Zygote, wrong: str, body: Any) -> None:
    process, port = starting.start(wrong, shutdown_s=2.0)
    connection = ask(port, body=body)
    until(lambda: is_busy(port))
    assert ended(starting, process, signal.SIGTERM) == 1
    connection.close()


def test_streams_that_nobody_reads_do_not_hold_it(starting: Zygote) -> None:
    process, port = starting.start("nothing", shutdown_s=20.0)
    with ExitStack() as streams:
        for _ in range(3):
            streams.callback(ask(port, body={**ASKED, "stream": True}).close)
        streams.enter_context(socket.create_connection(("127.0.0.1", port)))  # nor one that sends nothing
        until(lambda: is_busy(port))
        assert ended(starting, process, signal.SIGINT) == 0


def test_a_second_signal_ends_it_at_once(starting: Zygote) -> None:
    process, port = starting.start("prefill", shutdown_s=600.0)
    connection = ask(port, body=ASKED)
    until(lambda: is_busy(port))
    os.kill(process, signal.SIGINT)
    until(lambda: _refuses(port))  # the first one has been heard
    assert ended(starting, process, signal.SIGINT) == 130
    connection.close()


def _refuses(port: int) -> bool:
    try:
        return status_of(port, "/ready") == 503
    except OSError:
        return True


def test_a_scheduler_that_keeps_failing_ends_the_process_with_1(starting: Zygote) -> None:
    process, port = starting.start("loop")
    for _ in range(6):
        assert status_of(port, "/v1/messages", ASKED) == 500
    assert ended(starting, process) == 1


def test_few_descriptors_and_many_idle_clients_shut_nobody_out_for_long(starting: Zygote) -> None:
    process, port = starting.start("descriptors", header_s=2.0)
    with ExitStack() as clients:
        for _ in range(300):
            clients.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
        until(lambda: not _refuses_or_fails(port))
        assert status_of(port, "/v1/messages", {**ASKED, "max_tokens": 2}) == 200
    assert ended(starting, process, signal.SIGTERM) == 0


def _refuses_or_fails(port: int) -> bool:
    try:
        return status_of(port, "/health") != 200
    except (OSError, ValueError):
        return True
