"""While a server runs, collections leave alone what was there before, and come less often."""

from __future__ import annotations

import gc

import pytest

from kvfold.serve.garbage import rare_collections


def test_what_exists_is_frozen_and_young_objects_are_collected_seldom() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with rare_collections():
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold()[0] == 200_000
        assert gc.get_threshold()[1:] == before[1:]
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


def test_a_collector_that_is_off_stays_off_and_an_error_undoes_it() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with pytest.raises(KeyError), rare_collections():
            assert gc.get_threshold()[0] == 0
            raise KeyError
        assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)
