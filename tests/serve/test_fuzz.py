"""Requests drawn from the description of every route, whole and damaged: see `tests/serve/fuzz.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest

from kvfold.serve.settings import Limits
from tests.serve.bodies import call
from tests.serve.described import MAX_OUTPUT, ROUTES, Object, described
from tests.serve.fuzz import Fuzzer, draw, fuzz
from tests.serve.running import Running, running, tool_model


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), limits=Limits(output_tokens=MAX_OUTPUT)) as found:
        yield found


def test_no_request_is_answered_with_a_fault_of_the_servers(server: Running) -> None:
    with closing(Fuzzer(server)) as fuzzer:
        fuzz(fuzzer, seed=1, first=0, count=500)
    assert fuzzer.statuses[200] > 100
    assert fuzzer.statuses[400] > 200


def test_a_request_is_drawn_from_its_seed_and_number() -> None:
    assert draw(3, 17) == draw(3, 17)
    assert len({draw(3, number).body for number in range(50)}) > 40


@pytest.mark.parametrize("path", ROUTES)
def test_every_field_that_a_route_takes_is_described(server: Running, path: str) -> None:
    body = Object(ROUTES[path].required)(Random(0))
    message = call(server, path, {**body, "unknown": 1}).json["error"]["message"]
    assert sorted(message.partition("supported: ")[2].split(", ")) == described(path)
