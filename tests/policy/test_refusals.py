"""Expressions that cannot work: every message starts with the expression, says why, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch import Tensor

from kvfold.errors import PolicyError
from kvfold.policy import Policy, registry
from kvfold.policy.registry import load_variants, terms
from kvfold.score.base import Scorer, View


def _message(text: str) -> str:
    with pytest.raises(PolicyError) as caught:
        Policy.parse(text)
    start = f'policy "{text}": '
    assert str(caught.value).startswith(start)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(start)


def _names(axis: str) -> str:
    return ", ".join(term.name for term in terms(axis))


def test_unknown_name_of_a_guessable_axis() -> None:
    message = _message("snapkv + 8x + int3")
    assert message.startswith('no codec "int3"; did you mean ')
    assert message.endswith(f"codecs: {_names('codec')}")


def test_spelling_of_capitals_is_guessed() -> None:
    assert _message("SnapKV + 8x").startswith('no score "SnapKV"; did you mean snapkv? scores: ')


def test_unknown_name_without_a_guess_lists_every_axis() -> None:
    message = _message("qqqq")
    assert message.startswith('no term "qqqq"; scores: ')
    for term in terms():
        assert term.name in message


def test_unknown_codec_of_a_side_lists_codecs() -> None:
    assert _message("codec(k=snapkv)") == f'no codec "snapkv"; codecs: {_names("codec")}'
    assert _message("codec(k=4)") == f"4 is no codec; codecs: {_names('codec')}"


def test_unknown_argument_lists_arguments() -> None:
    assert _message("every(n=4)") == "every has no argument n=4; arguments of every: tokens=128"
    assert _message("every(1, 2)") == "every has no argument 2; arguments of every: tokens=128"
    assert _message("never(1)") == "never has no argument 1; trigger never takes no arguments"
    assert "arguments of int4: group_size=none, layers=:" in _message("int4(bits=3)")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("knorm + 8x + every(2.5)", "every: tokens takes a whole number, not 2.5"),
        ("knorm + 8x + every(true)", "every: tokens takes a whole number, not true"),
        ("knorm + 8x + every(8x)", "every: tokens takes a whole number, not 8x"),
        ("knorm + 8x + every(0)", "every: tokens is at least 1, not 0"),
        ("knorm + 8x + protect(-1)", "protect: sinks is at least 0, not -1"),
        ("snapkv(pool=median) + 8x", "snapkv: pool takes avg or max or none, not median"),
        ("int4(group_size=a)", "int4: group_size takes a whole number or none, not a"),
        ("knorm + 8x + ada(none)", "ada: floor takes a number, not none"),
        ("expected(covariance=1) + 8x", "expected: covariance takes true or false, not 1"),
        ("snapkv(window=8, window=9) + 8x", "snapkv: argument window is given twice"),
        ("snapkv(8, window=9) + 8x", "snapkv: argument window is given twice"),
        ("int4(layers=2:, layers=3:)", "int4: argument layers is given twice"),
        ("codec(k=int4, k=int8)", "codec: argument k is given twice"),
        ("int4(layers=2)", "int4(layers=2): layers takes a slice, such as 2:-2"),
        ("knorm + 0.5x", "size 0.5x: a ratio is at least 1x, and 8x keeps one slot in eight"),
    ],
)
def test_arguments(text: str, reason: str) -> None:
    assert _message(text) == reason


@pytest.mark.parametrize("text", ["codec", "codec(int4)", "codec(k=int4, q=int4)", "codec(layers=2:)"])
def test_codec_takes_sides(text: str) -> None:
    assert "codec takes k=, v= and layers=" in _message(text)


@pytest.mark.parametrize(
    ("text", "two"),
    [
        ("snapkv + knorm + 8x", "two scores, snapkv and knorm"),
        ("knorm + 8x + 4x", "two sizes, 8x and 4x"),
        ("knorm + 8x + ada + uniform", "two budgets, ada and uniform"),
        ("int4 + codec(k=int8)", "two codecs, int4 and codec(k=int8)"),
        ("keep + slot", "two positions, keep and slot"),
        ("knorm + 8x + every(4) + never", "two triggers, every(4) and never"),
        ("decode(knorm + h2o + 8x)", "two scores, knorm and h2o"),
    ],
)
def test_two_terms_on_one_axis(text: str, two: str) -> None:
    assert _message(text).startswith(f"{two}; keep one (")


def test_a_phase_stands_once() -> None:
    assert _message("prefill(knorm) + prefill(8x)").startswith("prefill(...) stands twice;")


@pytest.mark.parametrize("term", ["int4", "codec(k=int4)", "slot", "all"])
def test_a_phase_takes_some_axes_only(term: str) -> None:
    message = _message(f"prefill(knorm + 8x + {term})")
    assert f"{term} cannot stand inside prefill(...)" in message
    assert "a phase takes score, budget, size, when, protect, evicted" in message


def test_a_trigger_stands_in_its_own_phase() -> None:
    assert _message("prefill(knorm + 8x + every(4))").startswith("trigger every(4) belongs to decode, not to prefill;")


def test_size_without_a_score_lists_scores() -> None:
    assert _message("8x + int4").endswith(f"no score that says what to keep; scores: {_names('score')}")
    assert _message("prefill(knorm) + 8x").startswith("decode has size 8x but no score")


def test_score_without_a_size_names_examples() -> None:
    message = _message("snapkv + int4")
    assert message.startswith("prefill has score snapkv but no size")
    assert "snapkv + 8x" in message
    assert _message("knorm + prefill(8x)").startswith("decode has score knorm but no size")


def test_full_with_a_size() -> None:
    assert _message("full + 8x").startswith("prefill has score full, which keeps everything, and size 8x;")


@pytest.mark.parametrize(
    "text", ["ada", "int4 + protect(none)", "full + merge", "full + every(64)", "prefill(knorm + 8x) + every(64)"]
)
def test_terms_without_effect(text: str) -> None:
    assert "has no effect" in _message(text)


def test_layers_of_native_have_no_effect() -> None:
    assert "has no effect on native" in _message("native(layers=2:)")


@pytest.mark.parametrize("score", ["snapkv", "tova"])
def test_between_chunks_with_a_score_that_looks_at_the_end(score: str) -> None:
    message = _message(f"{score} + 8x + between_chunks")
    assert message.startswith(f"score {score} looks at the end of the prompt")
    allowed = message.split("needs no end: ")[1].split(", ")
    assert "knorm" in allowed
    assert not {"snapkv", "tova", "full"} & set(allowed)
    for name in allowed:
        Policy.parse(f"{name} + 8x + between_chunks")


@pytest.mark.parametrize(
    ("text", "trigger"),
    [
        ("knorm + 8x + kivi4 + every(64)", "every"),
        ("knorm + 2048tok + kivi2", "on_overflow"),
        ("knorm + 8x + codec(v=kivi4, layers=2:) + between_chunks", "between_chunks"),
    ],
)
def test_slots_that_cannot_move(text: str, trigger: str) -> None:
    message = _message(text)
    assert f"as trigger {trigger} would; use after_prefill + never" in message
    assert "kivi" not in message.split("whose slots can move: ")[1]


@pytest.mark.parametrize("text", ["kivi4", "snapkv + 8x + kivi4", "snapkv + 2048tok + kivi2 + never"])
def test_slots_that_cannot_move_need_not(text: str) -> None:
    Policy.parse(text)


@dataclass(frozen=True)
class _Unlucky(Scorer):
    """A score that refuses one value of its argument."""

    depth: int

    def validate(self) -> str | None:
        return "depth 3 is unlucky, take another" if self.depth == 3 else None

    def score(self, view: View) -> Tensor:
        return view.masked(view.position_RS)


@pytest.fixture
def unlucky(monkeypatch: pytest.MonkeyPatch) -> None:
    """A term of this file alone: other tests read the same registry."""
    load_variants()
    monkeypatch.setattr(registry, "_terms", dict(registry._terms))
    registry.register("score", "unlucky")(_Unlucky)


@pytest.mark.usefixtures("unlucky")
def test_reasons_of_a_term_are_passed_on() -> None:
    assert _message("unlucky(3) + 8x") == "unlucky: depth 3 is unlucky, take another"
    Policy.parse("unlucky(2) + 8x")


@pytest.mark.usefixtures("unlucky")
def test_required_argument() -> None:
    assert _message("unlucky + 8x") == "unlucky needs argument depth; arguments of unlucky: depth"
    assert "unlucky" not in _message("snapkv + 8x + between_chunks")


def test_long_expressions_are_cut_in_messages() -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.parse("a" * 5000)
    assert len(str(caught.value)) < 400
