"""Requests drawn from the description of every route, whole and damaged: see `tests/serve/fuzz.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
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


def test_the_docs_list_the_fields_of_every_route() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8").splitlines()
    rows = {cells[1].strip(" `"): cells[2:4] for cells in (line.split("|") for line in lines) if len(cells) == 5}
    for path, spec in ROUTES.items():
        listed = [name for cell in rows[path] for name in cell.split()]
        assert sorted(listed) == sorted(f"`{name}`" for name in spec.names), path
