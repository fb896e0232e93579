"""Terms that take a term as an argument."""

from __future__ import annotations

import dataclasses

import pytest

from kvfold.errors import PolicyError
from kvfold.policy import Policy, registry
from kvfold.policy.describe import rows
from kvfold.policy.registry import find
from kvfold.score import Chunk, KeyDiff, SnapKV


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("chunk + 4x", Chunk()),
        ("chunk(snapkv) + 4x", Chunk()),
        ("chunk(snapkv()) + 4x", Chunk()),
        ("chunk(keydiff, 20) + 4x", Chunk(KeyDiff(), size=20)),
        ("chunk(size=20, scorer=keydiff) + 4x", Chunk(KeyDiff(), size=20)),
        ("chunk(snapkv(window=16, pool=max), reuse=2) + 4x", Chunk(SnapKV(16, pool="max"), reuse=2)),
        ("chunk(chunk(keydiff, 5)) + 4x", Chunk(Chunk(KeyDiff(), 5))),
    ],
)
def test_reading(text: str, score: Chunk) -> None:
    assert Policy.parse(text).prefill.score == score


def test_the_canonical_form_writes_inner_defaults_too() -> None:
    text = str(Policy.parse("chunk(streaming, 7) + 4x"))
    assert text.startswith("chunk(scorer=streaming(sinks=4), size=7, shared=true, reuse=1) + uniform + 4x")
    assert str(Policy.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("chunk(snapkv(window=32)) + 4x", "chunk + 4x"),
        ("chunk(scorer=keydiff, size=10) + 4x", "chunk(keydiff) + 4x"),
        ("chunk(snapkv(16), 20) + 4x", "chunk(snapkv(window=16), size=20) + 4x"),
    ],
)
def test_the_short_form_leaves_defaults_out(text: str, short: str) -> None:
    assert Policy.parse(text).short == short
    assert Policy.parse(short) == Policy.parse(text)


def test_fingerprints_tell_inner_terms_apart() -> None:
    texts = ("chunk + 4x", "chunk(snapkv(16)) + 4x", "chunk(keydiff) + 4x", "snapkv + 4x")
    assert len({Policy.parse(text).fingerprint for text in texts}) == len(texts)


@pytest.mark.parametrize(("name", "changes"), [("chunk", True), ("snapkv", True), ("keydiff", False)])
def test_a_revision_of_an_inner_term_changes_the_fingerprint(
    name: str, changes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy.parse("chunk + 4x")
    before, term = policy.fingerprint, find(name)
    assert term is not None
    monkeypatch.setitem(registry._terms, name, dataclasses.replace(term, revision=term.revision + 1))
    assert (policy.fingerprint != before) is changes


def test_the_table_shows_the_inner_default() -> None:
    (row,) = [row for row in rows() if row.name == "chunk"]
    assert row.arguments == "scorer=snapkv, size=10, shared=true, reuse=1"


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        ("int4", 'no score "int4"; scores: '),
        ("snapkw", 'no score "snapkw"; did you mean snapkv? '),
        ("3", "3 is no score; scores: "),
        ("snapkv(windw=3)", "snapkv has no argument windw=3; "),
        ("full", "chunk(full): the inner score keeps everything; name one that evicts"),
        ("chunk(reuse=2)", "chunk(chunk): reuse has no effect inside another score; write it on the outer chunk"),
    ],
)
def test_refusals(inner: str, reason: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.parse(f"chunk({inner}) + 4x")
    assert reason in str(caught.value)


def test_what_the_inner_score_needs_decides_when_it_may_be_asked() -> None:
    with pytest.raises(PolicyError, match="score chunk looks at the end of the prompt"):
        Policy.parse("chunk + 4x + between_chunks")
    Policy.parse("chunk(keydiff) + 4x + between_chunks")
    assert Policy.parse("chunk(streaming) + 512tok").prefill.when == Policy.parse("streaming + 512tok").prefill.when
