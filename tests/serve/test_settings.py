"""What operators decide, and what follows from it where they do not."""

from __future__ import annotations

import pytest

from kvfold.errors import InputError
from kvfold.serve.settings import Limits, Settings

KEYS = {"digest": "a"}


def test_one_tenant_has_half_of_the_places_where_there_are_keys() -> None:
    assert Settings(("m",)).per_tenant == 64, "there is one tenant, which nobody has to be kept from"
    assert Settings(("m",), tenants=KEYS).per_tenant == 32
    assert Settings(("m",), Limits(running=1), tenants=KEYS).per_tenant == 1
    assert Settings(("m",), Limits(running=8, per_tenant=20), tenants=KEYS).per_tenant == 20
    with pytest.raises(InputError, match="the limit per_tenant is 0; it must be above 0"):
        Limits(per_tenant=0)


def test_a_place_is_kept_for_other_tenants_where_there_can_be_any() -> None:
    assert Settings(("m",), tenants=KEYS).num_reserved == 1
    assert Settings(("m",)).num_reserved == Settings(("m",), Limits(running=1), tenants=KEYS).num_reserved == 0
