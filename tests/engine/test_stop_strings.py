"""Stop strings are found where they first stand, and no character is looked at twice."""

from __future__ import annotations

import random

import pytest

from kvfold.engine import detokenizer as stops
from kvfold.engine.detokenizer import StopMatcher, overlap


def test_matches_are_those_of_a_search_from_the_beginning() -> None:
    rng = random.Random(0)
    for _ in range(500):
        stop = "".join(rng.choices("ab", k=rng.randint(1, 5)))
        matcher, text = StopMatcher(stop), ""
        while stop not in text and len(text) < 40:
            piece = "".join(rng.choices("abc", weights=(5, 5, 1), k=rng.randrange(4)))
            end = matcher.add(piece)
            text += piece
            at = text.find(stop)
            assert (None if end is None else len(text) - len(piece) + end) == (at + len(stop) if at >= 0 else None)
            if at < 0:
                longest = max(n for n in range(len(stop)) if text.endswith(stop[:n]))
                assert matcher.matched == overlap(text, stop) == longest


class Counted(str):
    """A stop string that counts how often one of its characters is compared."""

    num_compared = 0

    def __getitem__(self, at: object) -> str:
        Counted.num_compared += 1
        return str.__getitem__(self, at)  # type: ignore[index]


def test_the_cost_of_a_character_grows_with_neither_text_nor_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "num_compared", 0)
    matcher = StopMatcher(Counted("a" * 100_000 + "b"))
    Counted.num_compared = 0
    for _ in range(1000):
        matcher.add("aaaaaaaaac")  # begins to match, and has to begin anew
    assert Counted.num_compared < 5 * 10_000


def test_looking_for_the_start_of_a_call_reads_the_end_of_a_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[str]()
    add = StopMatcher.add

    def noted(self: StopMatcher, piece: str) -> int | None:
        seen.append(piece)
        return add(self, piece)

    monkeypatch.setattr(stops.StopMatcher, "add", noted)
    assert overlap("x" * 100_000 + "<tool", "<tool_call>") == 5
    assert sum(map(len, seen)) < len("<tool_call>")
