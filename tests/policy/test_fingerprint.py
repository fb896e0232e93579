"""A fingerprint names the results of a policy: it is the same in every process and changes with every choice."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from kvfold.policy import Policy, registry
from kvfold.policy.registry import find

TEXTS = (
    "full",
    "snapkv + ada + 8x + int4",
    "prefill(snapkv + 8x) + decode(h2o + 2048tok) + codec(k=int8, v=int4, layers=2:-2)",
)
_PRINT = (
    "import sys; from kvfold.policy import Policy; [print(Policy.parse(text).fingerprint) for text in sys.argv[1:]]"
)


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
def test_same_in_every_process(seed: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PRINT, *TEXTS],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [Policy.parse(text).fingerprint for text in TEXTS]


def test_is_a_sha256() -> None:
    fingerprint = Policy.parse("full").fingerprint
    assert len(fingerprint) == 64
    assert set(fingerprint) <= set("0123456789abcdef")


def test_ways_to_write_one_policy_share_it() -> None:
    spellings = ("snapkv + 8x", " 8x+snapkv( 32 ) ", "prefill(snapkv + 8x) + decode(8x + snapkv) + never + native")
    assert len({Policy.parse(text).fingerprint for text in spellings}) == 1


def test_every_choice_changes_it() -> None:
    texts = (
        *("knorm + 8x", "keydiff + 8x", "knorm + 4x", "knorm + 8x + ada", "knorm + 8x + ada(0.3)"),
        *("knorm + 8x + every(64)", "knorm + 8x + between_chunks", "knorm + 8x + protect(none)", "knorm + 8x + merge"),
        *("knorm + 8x + slot", "knorm + 8x + int4", "knorm + 8x + int4(layers=2:)", "knorm + 8x + codec(k=int4)"),
        *("prefill(knorm + 8x)", "decode(knorm + 8x)"),
    )
    assert len({Policy.parse(text).fingerprint for text in texts}) == len(texts)


@pytest.mark.parametrize(
    ("text", "name", "changes"),
    [
        ("knorm + 8x", "knorm", True),
        ("knorm + 8x", "drop", True),
        ("knorm + 8x", "snapkv", False),
        ("int4(layers=2:)", "native", True),
        ("int4", "native", False),
        ("codec(k=int8, v=int4)", "int4", True),
    ],
)
def test_revisions_of_its_terms_change_it(text: str, name: str, changes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Policy.parse(text)
    fingerprint = before.fingerprint
    term = find(name)
    assert term is not None
    monkeypatch.setitem(registry._terms, name, dataclasses.replace(term, revision=term.revision + 1))
    assert (before.fingerprint != fingerprint) is changes
