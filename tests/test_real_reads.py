"""A real model: what reads of few pages and a prompt of few tokens in later layers still find."""

from __future__ import annotations

import pytest

import kvfold
from kvfold.models.loader import Model

pytestmark = pytest.mark.model

BOAT = ["We sailed around the harbour and the wind was good for the boat.", "The sail of the boat was wet."]
OVEN = ["The bakery smelled of bread and the oven was cleaned.", "We kneaded the bread with flour near the oven."]
TURNS = [
    *BOAT * 4,
    "The pass key of the boat is 48213.",
    *BOAT * 4,
    *OVEN * 4,
    "The pass key of the oven is 90657.",
    *OVEN * 4,
]
TEXT = "".join(f"{turn}\n" for turn in TURNS)
ASKED = {
    "What is the pass key of the boat? The pass key of the boat is": "48213",
    "What is the pass key of the oven? The pass key of the oven is": "90657",
}


def answers(model: Model, policy: str) -> list[str]:
    with kvfold.Session(model, policy, template=None) as session:
        session.extend(TEXT)
        return [session.ask(text, max_new_tokens=8).text for text in ASKED]


def test_pages_chosen_by_channels_answer_as_everything_does(smollm2: Model) -> None:
    """128 of 450 slots are read, a window of as many slots knows no key."""
    full, chosen, window = (answers(smollm2, p) for p in ("full", "rocket(tokens=256)", "streaming + 128tok"))
    assert chosen == full and "90657" in full[1]
    assert not any(key in text for text in window for key in ASKED.values())


def test_tokens_that_the_question_looks_at_go_on(smollm2: Model) -> None:
    """The question is known; half of the layers run on two fifths of the tokens. One key: of two, the model itself
    gives the later for both."""
    question, key = next(iter(ASKED.items()))
    text = "".join(f"{turn}\n" for turn in TURNS if "key of the oven" not in turn)
    with kvfold.Session(smollm2, "fastkv(rate=0.4)", template=None) as session:
        session.extend(text + question)
        assert len(session.kept(-1, 0)) < 0.42 * len(session.token_ids) == 0.42 * len(session.kept(0, 0))
        assert key in session.generate(max_new_tokens=8).text
