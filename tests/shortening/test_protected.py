"""Kinds of spans that can be kept, by example, and the parts that hold them."""

from __future__ import annotations

import numpy as np
import pytest

from kvfold.errors import PolicyError
from kvfold.shortening.parts import parts_of
from kvfold.shortening.protected import KINDS, kinds_of, protected_parts, protected_spans
from tests.shortening.texts import MARKDOWN

EXAMPLES = {
    "numbers": (
        ("It took 12 km at 30 km/h, 4.5%.", ["12 km", "30 km/h", "4.5%"]),
        ("On 2024-05-01 at 12:30 it cost $3.50 or 1,200 EUR.", ["2024-05-01", "12:30", "$3.50", "1,200 EUR"]),
        ("16 GB in 20 ms, -4 °C, 3 million dollars", ["16 GB", "20 ms", "-4 °C", "3 million"]),
        ("Three of 7 went in 1999, room 12.", []),
    ),
    "ids": (
        ("Ask X-42b7 or 48213, not 4711.", ["X-42b7", "48213", "4711"]),
        ("commit 8a91b36, user_17, COVID-19", ["8a91b36", "user_17", "COVID-19"]),
        ("In 1984 the 20th of 12 in the 1990s, 3.1415 and v2", []),
    ),
    "quotes": (
        ('He said "it is so" and “no more”, «jamais», `pip -U`.', ['"it is so"', "“no more”", "«jamais»", "`pip -U`"]),
        ('A 5" pipe.\nA 6" pipe.', []),
    ),
    "urls": (
        ("See https://a.org/b?c=1 or www.d.net now, ann@e.com", ["https://a.org/b?c=1", "www.d.net", "ann@e.com"]),
        ("and/or a.b", []),
    ),
    "negations": (
        ("Do not go. Never! Isn't it? Nobody noted", ["not", "Never", "n't"]),
        ("All except one, unless it cannot", ["except", "unless", "cannot"]),
        ("noble nevertheless", []),
    ),
}


@pytest.mark.parametrize(("kind", "text", "expected"), [(kind, *each) for kind in EXAMPLES for each in EXAMPLES[kind]])
def test_spans_by_kind(kind: str, text: str, expected: list[str]) -> None:
    assert [text[slice(*span)] for span in protected_spans(text, [kind])] == expected


def test_kinds_that_layout_tells() -> None:
    parts = parts_of(MARKDOWN)

    def kept(*kinds: str) -> list[str]:
        kept_n = protected_parts(MARKDOWN, parts, kinds)
        return [MARKDOWN[part.start : part.end].strip() for part, keep in zip(parts, kept_n, strict=True) if keep]

    assert kept("headings") == ["# Install", "## Options", "Usage\n-----"]
    assert kept("code") == ["```sh\npip install thing  # never as root\n\nthing --check\n```"]
    assert kept("ids") == ["Ask id X-42b7 if it fails."] and kept("urls") == ["See https://example.org/docs for more."]
    assert kept() == [] and set(kept(*KINDS)) >= {*kept("headings"), *kept("code"), *kept("ids"), *kept("negations")}


def test_all_parts_of_a_span_stay() -> None:
    text = 'Before. She wrote: "It is late. We must go." After.'
    parts = parts_of(text)
    kept = protected_parts(text, parts, ["quotes"])
    held = "".join(text[part.start : part.end] for part, keep in zip(parts, kept, strict=True) if keep)
    assert '"It is late. We must go."' in held and not kept[0]
    assert not np.any(protected_parts(text, parts, ["urls"]))


def test_names_of_kinds() -> None:
    assert kinds_of("code, numbers") == ("numbers", "code")  # in one order, however they are written
    assert kinds_of("all") == KINDS and kinds_of("none") == ()
    for wrong in ("names", ""):
        with pytest.raises(PolicyError, match="is nothing that can be kept; kinds: numbers, ids, quotes"):
            kinds_of(wrong)
    with pytest.raises(PolicyError, match="all stands alone, and here are 2 kinds; write all, or the kinds"):
        kinds_of("all, code")
