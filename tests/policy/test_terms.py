"""What a policy asks of every term is declared on its base: no term is asked for what it lacks."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvfold.codec.base import Codec, CrossLayerCodec
from kvfold.codec.basis import LowRankCodec
from kvfold.errors import PolicyError
from kvfold.policy.registry import Term, load_variants, register, terms
from kvfold.triggers import AfterPrefill, BetweenChunks, Counters, Every, Never, OnOverflow

load_variants()


def test_every_term_has_the_hooks_that_a_policy_calls() -> None:
    for term in terms():
        assert issubclass(term.variant, Term), term.name


def test_a_class_that_is_no_term_is_refused() -> None:
    @dataclass(frozen=True)
    class Foreign:
        """Not a term."""

    with pytest.raises(PolicyError, match='term "foreign": Foreign must be a frozen dataclass that derives from Term'):
        register("score", "foreign")(Foreign)


def test_triggers_say_when_a_prefill_compresses() -> None:
    assert [trigger.chunk_len for trigger in (AfterPrefill(), BetweenChunks(64), Never(), OnOverflow(), Every(8))] == [
        None, 64, None, None, None,
    ]  # fmt: skip
    full = Counters(stored_len=100, target_len=50, since_last=100)
    assert [trigger.due(full) for trigger in (AfterPrefill(), BetweenChunks(), Never())] == [False] * 3
    assert OnOverflow().due(full) and Every(8).due(full)


def test_codecs_with_a_contract_of_their_own_are_told_by_it() -> None:
    codecs: list[type[Codec]] = [term.variant for term in terms("codec")]
    assert {codec for codec in codecs if codec.needs_below} == {c for c in codecs if issubclass(c, CrossLayerCodec)}
    assert {codec for codec in codecs if codec.needs_basis} == {c for c in codecs if issubclass(c, LowRankCodec)}
