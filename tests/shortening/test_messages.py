"""Messages of a conversation: which texts are cut, and where the question of a selector that reads one stands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvfold.errors import InputError, SizeError
from kvfold.shortening.messages import shorten_messages
from kvfold.shortening.text import plan_of

THINGS = ("lamp", "bell", "boat", "clock", "drum", "flag", "globe", "harp")
ROOMS = "Rooms of the house.\n\n" + "\n\n".join(f"The {thing} is in room {n}." for n, thing in enumerate(THINGS, 11))
ROOMS += "\n\nThat is all."
RANK = replace(plan_of("rank", "3x", "none", embedder="tfidf"), least=32)


def user(*texts: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": text} for text in texts]}


def test_the_question_is_the_end_of_the_last_text_of_a_user() -> None:
    for thing, other in (("boat", "harp"), ("harp", "boat")):
        asked = f"You read the list. Where is the {thing}?"
        reply = {"role": "assistant", "content": f"Is it the {other}?"}
        for messages in ([user(ROOMS, asked)], [user(ROOMS), reply, {"role": "user", "content": asked}]):
            shorter, done = shorten_messages(messages, RANK)
            cut = shorter[0]["content"][0]["text"]
            assert f"The {thing} is in room" in cut and f"The {other} is in room" not in cut
            assert cut == done[0].text and cut.startswith("Rooms of the house.") and cut.endswith("That is all.")


def test_a_question_that_is_given_counts() -> None:
    shorter, _ = shorten_messages([user(ROOMS, "Where is the boat?")], RANK, question="Where is the drum?")
    assert "The drum is in" in shorter[0]["content"][0]["text"]


def test_a_blank_text_asks_nothing() -> None:
    first, last = user(ROOMS, "Where is the drum?", ""), {"role": "user", "content": " "}
    found = [shorten_messages([first, *more], RANK)[0] for more in ([], [last])]
    assert found[0] == found[1][:-1] and found[1][-1] == last and "The drum is in" in found[0][0]["content"][0]["text"]


def test_a_single_paragraph_has_room_between_its_ends() -> None:
    """Its end would be 128 tokens, where a quarter of it is fewer."""
    sentences = [f"The {thing} of house {n} is in room {n + 3}." for n in range(5) for thing in THINGS]
    (message,), (done,) = shorten_messages([{"role": "user", "content": " ".join(sentences)}], plan_of("graph", "8x"))
    cut = message["content"]
    assert len(done.spans) > 2 and done.num_tokens <= done.num_original_tokens / 8 + 1 < 128
    assert cut.startswith(sentences[0]) and cut.endswith(sentences[-1])


def test_ends_that_do_not_fit_stay_whole_or_are_named() -> None:
    text = "Where is the lamp, and who has seen it? Where is the bell, and who has heard it?"
    message = {"role": "user", "content": text}
    assert shorten_messages([message], plan_of("graph", "3x", "none"))[0] == [message]
    with pytest.raises(
        SizeError, match=r"what must stay \(the ends of the message\) is 22 tokens, .* may; shorten to 1x"
    ):
        shorten_messages([message], plan_of("graph", "9tok", "none"))


def test_without_a_user_there_is_no_question() -> None:
    tool = {"role": "tool", "content": ROOMS}
    with pytest.raises(InputError, match="rank keeps what a question asks for; give the question"):
        shorten_messages([tool], RANK)
    shorter, done = shorten_messages([tool], plan_of("graph", "3x", "none", embedder="tfidf"))
    assert shorter == [{"role": "tool", "content": done[0].text}] and len(done[0].text) < len(ROOMS)


def test_what_is_no_text_stays() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [image, {"type": "text", "text": ROOMS}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": ""},
        {"role": "developer", "content": ROOMS},
        {"content": ROOMS},
    ]
    shorter, done = shorten_messages(messages, plan_of("graph", "3x", "none", embedder="tfidf"))
    assert shorter[0]["content"] == [image, {"type": "text", "text": done[0].text}] and len(done) == 1
    assert shorter[1:] == messages[1:]
    assert messages[0]["content"][1]["text"] == ROOMS  # what was given is not changed
