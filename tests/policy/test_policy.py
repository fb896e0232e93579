"""What an expression denotes: defaults, phases, triggers, codecs per side and layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvfold.budget import Ada, Uniform
from kvfold.codec import Codec, Int4, Int8, Native
from kvfold.errors import PolicyError
from kvfold.evicted import Drop, Merge
from kvfold.policy import Policy
from kvfold.policy.parts import CodecPlan, LayerSlice
from kvfold.policy.registry import term_of
from kvfold.policy.size import Ratio, Tokens
from kvfold.position import Keep, Slot
from kvfold.protect import Protect
from kvfold.score import Full, KNorm, SnapKV
from kvfold.triggers import AfterPrefill, BetweenChunks, Every, Never, OnOverflow


def _triggers(text: str) -> tuple[str, str]:
    policy = Policy.parse(text)
    return term_of(policy.prefill.when).name, term_of(policy.decode.when).name


def test_defaults() -> None:
    policy = Policy.parse("full")
    for stage in (policy.prefill, policy.decode):
        assert stage.score == Full()
        assert stage.budget == Uniform()
        assert stage.size is None
        assert stage.protect == Protect(sinks=4, recent=32)
        assert stage.evicted == Drop()
    assert (policy.prefill.when, policy.decode.when) == (AfterPrefill(), Never())
    assert policy.codec == CodecPlan(Native(), Native())
    assert policy.position == Keep()
    assert term_of(policy.attend).name == "all"


def test_score_is_full_when_only_storage_is_named() -> None:
    assert Policy.parse("int4").prefill.score == Full()


def test_outer_terms_apply_to_both_phases() -> None:
    policy = Policy.parse("snapkv(window=16) + ada + 8x + protect(sinks=2) + merge + slot")
    for stage in (policy.prefill, policy.decode):
        assert stage.score == SnapKV(window=16)
        assert stage.budget == Ada()
        assert stage.size == Ratio(8)
        assert stage.protect == Protect(sinks=2)
        assert stage.evicted == Merge()
    assert policy.position == Slot()


def test_arguments_go_by_place_and_by_name() -> None:
    by_place = Policy.parse("snapkv(16, 3, max) + 8x")
    assert by_place == Policy.parse("snapkv(pool=max, kernel=3, window=16) + 8x")
    assert by_place.prefill.score == SnapKV(16, 3, "max")


def test_numbers_become_what_the_field_wants() -> None:
    floor = Policy.parse("knorm + 8x + ada(1)").prefill.budget
    assert isinstance(floor, Ada)
    assert type(floor.floor) is float


def test_terms_of_a_phase_stay_in_it() -> None:
    policy = Policy.parse("prefill(snapkv + ada + 8x) + decode(knorm + 2048tok) + int4")
    assert (policy.prefill.score, policy.prefill.budget, policy.prefill.size) == (SnapKV(), Ada(), Ratio(8))
    assert (policy.decode.score, policy.decode.budget, policy.decode.size) == (KNorm(), Uniform(), Tokens(2048))


def test_terms_of_a_phase_win_over_outer_ones() -> None:
    policy = Policy.parse("knorm + 8x + ada + decode(4x + uniform)")
    assert (policy.prefill.size, policy.prefill.budget) == (Ratio(8), Ada())
    assert (policy.decode.size, policy.decode.budget, policy.decode.score) == (Ratio(4), Uniform(), KNorm())


def test_phase_without_terms_keeps_everything() -> None:
    policy = Policy.parse("prefill(snapkv + 8x)")
    assert policy.prefill.evicts
    assert not policy.decode.evicts
    assert policy.decode.score == Full()


@pytest.mark.parametrize(
    ("text", "prefill", "decode"),
    [
        ("knorm + 8x", "after_prefill", "never"),
        ("knorm + 12.5%mem", "after_prefill", "never"),
        ("knorm + 2048tok", "after_prefill", "on_overflow"),
        ("knorm + 1MB", "after_prefill", "on_overflow"),
        ("knorm + min(8x, 2048tok)", "after_prefill", "on_overflow"),
        ("streaming + 2048tok", "between_chunks", "on_overflow"),
        ("recent + 1MB", "between_chunks", "on_overflow"),
        ("streaming + 8x", "after_prefill", "never"),
        ("streaming + 2048tok + after_prefill", "after_prefill", "on_overflow"),
        ("knorm + 2048tok + never", "after_prefill", "never"),
        ("knorm + 8x + between_chunks + every(64)", "between_chunks", "every"),
        ("prefill(knorm + 8x) + decode(knorm + 2048tok)", "after_prefill", "on_overflow"),
        ("knorm + 8x + every(9) + decode(every(8))", "after_prefill", "every"),
    ],
)
def test_triggers(text: str, prefill: str, decode: str) -> None:
    assert _triggers(text) == (prefill, decode)


def test_trigger_arguments_reach_their_phase() -> None:
    policy = Policy.parse("knorm + 8x + between_chunks(256) + every(9) + decode(every(8))")
    assert (policy.prefill.when, policy.decode.when) == (BetweenChunks(256), Every(8))


def test_protect_none() -> None:
    assert Policy.parse("knorm + 8x + protect(none)").prefill.protect == Protect(sinks=0, recent=0)


def _stored(text: str, num_layers: int = 5) -> list[tuple[Codec, Codec]]:
    plan = Policy.parse(text).codec
    return [plan.sides(layer, num_layers) for layer in range(num_layers)]


def test_codec_of_every_layer() -> None:
    assert _stored("int4") == [(Int4(), Int4())] * 5


def test_layers_outside_the_slice_stay_native() -> None:
    native = (Native(), Native())
    assert _stored("int4(layers=2:-2)") == [native, native, (Int4(), Int4()), native, native]
    assert _stored("int4(layers=::2)") == [(Int4(), Int4()), native, (Int4(), Int4()), native, (Int4(), Int4())]


def test_sides_apart() -> None:
    assert _stored("codec(k=int8, v=int4(group_size=32), layers=1:)", 2) == [
        (Native(), Native()),
        (Int8(), Int4(group_size=32)),
    ]
    assert _stored("codec(v=int8)", 1) == [(Native(), Int8())]


def test_slices_that_mean_all_layers_are_equal() -> None:
    assert Policy.parse("int4(layers=0::1)") == Policy.parse("int4(layers=:)") == Policy.parse("int4")
    assert LayerSlice(0, None, 1).is_all


def test_a_policy_is_taken_as_it_is() -> None:
    policy = Policy.parse("full")
    assert Policy.parse(policy) is policy


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(PolicyError, match="not int"):
        Policy.parse(8)  # type: ignore[arg-type]


def test_a_changed_policy_is_checked() -> None:
    policy = Policy.parse("snapkv + 8x")
    with pytest.raises(PolicyError, match="looks at the end of the prompt"):
        replace(policy, prefill=replace(policy.prefill, when=BetweenChunks()))
    with pytest.raises(PolicyError, match="on_overflow belongs to decode"):
        replace(policy, prefill=replace(policy.prefill, when=OnOverflow()))
    with pytest.raises(PolicyError, match="sinks is at least 0"):
        replace(policy, decode=replace(policy.decode, protect=Protect(sinks=-1)))
