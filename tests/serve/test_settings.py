"""What operators decide, and what follows from it where they do not."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvfold.cli.main import build_parser
from kvfold.errors import InputError
from kvfold.serve.settings import Limits, Settings

KEYS = {"digest": "a"}


def test_one_tenant_has_half_of_the_places_where_there_are_keys() -> None:
    assert Settings(("m",)).per_tenant == 64 + 256, "there is one tenant, which may fill the queue"
    assert Settings(("m",), tenants=KEYS).per_tenant == 32
    assert Settings(("m",), Limits(running=1), tenants=KEYS).per_tenant == 1
    assert Settings(("m",), Limits(running=8, per_tenant=20), tenants=KEYS).per_tenant == 20


def test_what_is_refused_is_named_as_the_option_it_came_from() -> None:
    options = build_parser().parse_args(["serve"])
    for field in fields(Limits):
        with pytest.raises(InputError, match="is 0; give a number above 0") as caught:
            Limits(**{field.name: 0})
        name = str(caught.value).split()[0].removeprefix("--").replace("-", "_")
        assert name in options, field.name
    with pytest.raises(InputError, match="--timeout is inf"):
        Limits(request_s=float("inf"))
    for temperature in (5.0, -0.1, float("nan")):
        with pytest.raises(InputError, match=r"--temperature is .*; requests take 0 \(greedy\) to 2"):
            Settings(("m",), temperature=temperature)


def test_a_place_is_kept_for_other_tenants_where_there_can_be_any() -> None:
    assert Settings(("m",), tenants=KEYS).num_reserved == 1
    assert Settings(("m",)).num_reserved == Settings(("m",), Limits(running=1), tenants=KEYS).num_reserved == 0
