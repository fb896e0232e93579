"""Texts of a policy: the canonical form and the short one read back as the same policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import chdir

import pytest
from hypothesis import HealthCheck, given, settings

from kvfold.errors import PolicyError
from kvfold.policy import Policy
from tests.policy.expressions import FILES, expressions, policies

many = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fingerprints read the files that terms name."""
    folder = tmp_path_factory.mktemp("files")
    for name in FILES:
        (folder / name).write_text(name)
    with chdir(folder):
        yield


@many
@given(policies())
def test_canonical_form_reads_back(policy: Policy) -> None:
    again = Policy.parse(str(policy))
    assert again == policy
    assert str(again) == str(policy)
    assert again.fingerprint == policy.fingerprint


@many
@given(policies())
def test_short_form_reads_back(policy: Policy) -> None:
    assert Policy.parse(policy.short) == policy
    assert Policy.parse(policy.short).short == policy.short


@many
@given(policies(), policies())
def test_forms_tell_policies_apart(one: Policy, other: Policy) -> None:
    assert (one == other) == (str(one) == str(other)) == (one.fingerprint == other.fingerprint)
    assert (one == other) == (one.short == other.short)


@many
@given(expressions())
def test_order_of_outer_terms_means_nothing(text: str) -> None:
    assert _outcome(text) == _outcome(" + ".join(reversed(_outer_terms(text))))


def _outcome(text: str) -> object:
    try:
        return Policy.parse(text)
    except PolicyError:
        return None


def _outer_terms(text: str) -> list[str]:
    """Split at the + signs outside of parentheses; a + inside a number such as 1e+17 has no spaces around it."""
    found, depth = [""], 0
    for word in text.split(" + "):
        found[-1] += word if not depth else f" + {word}"
        depth += word.count("(") - word.count(")")
        if not depth:
            found.append("")
    return found[:-1]


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (
            "full",
            "full + uniform + after_prefill + never + protect(sinks=4, recent=32) + drop + keep + native + all + dense",
        ),
        (
            "int8(layers=1:-1) + protect(none) + 4 x + knorm + every(64)",
            "knorm + uniform + 4x + after_prefill + every(tokens=64) + protect(sinks=0, recent=0) + drop + keep"
            " + int8(group_size=none, layers=1:-1) + all + dense",
        ),
        (
            "decode(2048tok + keydiff) + prefill(knorm + 8x + ada)",
            "prefill(knorm + ada(floor=0.2) + 8x) + decode(keydiff + uniform + 2048tok) + after_prefill + on_overflow"
            " + protect(sinks=4, recent=32) + drop + keep + native + all + dense",
        ),
        (
            "prefill(knorm + 8x)",
            "prefill(knorm + 8x) + decode(full) + uniform + after_prefill + never"
            " + protect(sinks=4, recent=32) + drop + keep + native + all + dense",
        ),
        (
            "codec(v=int4, layers=2:)",
            "full + uniform + after_prefill + never + protect(sinks=4, recent=32) + drop + keep"
            " + codec(k=native, v=int4(group_size=none), layers=2:) + all + dense",
        ),
    ],
)
def test_canonical_form(text: str, canonical: str) -> None:
    assert str(Policy.parse(text)) == canonical


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("full + native + never", "full"),
        ("native", "full"),
        ("full + int4", "int4"),
        ("snapkv(window=32, kernel=7) + uniform + 8x + after_prefill", "snapkv(kernel=7) + 8x"),
        ("knorm + 8x + protect(none)", "knorm + 8x + protect(none)"),
        ("knorm + 8x + protect(0)", "knorm + 8x + protect(sinks=0)"),
        ("streaming + 2048tok + between_chunks + on_overflow", "streaming + 2048tok"),
        ("streaming + 8x + between_chunks", "streaming + 8x + between_chunks"),
        ("prefill(knorm + 8x) + decode(knorm + 8x)", "knorm + 8x"),
        ("prefill(knorm + 8x) + decode(knorm + 4x)", "prefill(8x) + decode(4x) + knorm"),
        ("codec(k=int8, v=int8)", "int8"),
        ("codec(k=native, v=int8)", "codec(v=int8)"),
    ],
)
def test_short_form(text: str, short: str) -> None:
    assert Policy.parse(text).short == short
