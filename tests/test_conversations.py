"""Sessions as conversations: messages and text through the chat template, turn by turn."""

from __future__ import annotations

from typing import Any

import pytest

from kvfold.errors import InputError, ModelError
from kvfold.models.loader import Model, wrap
from kvfold.session import Session
from tests.engine.runs import Shared
from tests.tiny import build, greedy, tokenizer


def test_messages_go_through_the_template(model: Model) -> None:
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "more"},
    ]
    with Session(model) as session:
        session.extend(messages=messages)
        assert session.token_ids == _rendered(messages)
        reply = session.generate(max_new_tokens=6)
        asked = _rendered(messages, add_generation_prompt=True)
        assert session.token_ids == asked + reply.token_ids
        assert reply.token_ids == greedy(build(), asked, 6)
        with pytest.raises(InputError, match="messages start a conversation"):
            session.extend(messages=messages)


def _rendered(messages: list[dict[str, str]], **options: Any) -> list[int]:
    text = tokenizer().apply_chat_template(messages, tokenize=False, **options)
    found: list[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


def test_many_turns_are_the_whole_conversation(model: Model) -> None:
    """Extending, replying and extending again gives the tokens of rendering everything at once."""
    with Session(model) as session:
        turns: list[dict[str, str]] = []
        replies: list[list[int]] = []
        for text in ("a first question", "another", "the last"):
            session.extend(text[:3]).extend(text[3:])
            replies.append(session.generate(max_new_tokens=5).token_ids)
            turns.append({"role": "user", "content": text})
            expected = _rendered(_with_marks(turns), add_generation_prompt=True)
            assert session.token_ids == _unmarked(expected, replies)
            turns.append({"role": "assistant", "content": ""})


def _with_marks(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """Two tildes for each reply, whose tokens need not survive decoding and encoding."""
    return [turn if turn["role"] == "user" else {**turn, "content": "~~"} for turn in turns]


def _unmarked(ids: list[int], replies: list[list[int]]) -> list[int]:
    """Put each reply where its two tildes stand, and the last one at the end."""
    mark = tokenizer()("~~")["input_ids"]
    found, left, at = [], list(replies), 0
    while at < len(ids):
        if ids[at : at + 2] == mark:
            found += left.pop(0)
            at += 2
        else:
            found.append(ids[at])
            at += 1
    return found + left.pop(0)


def test_a_reply_that_ended_itself_is_not_ended_twice(shared: Shared) -> None:
    """When the model wrote the end-of-turn token, the next turn does not repeat it."""
    model = shared("llama")
    end = tokenizer().convert_tokens_to_ids("<end>")
    object.__setattr__(model.spec, "eos_token_ids", frozenset({end}))
    try:
        with Session(model) as session:
            session.extend("hello").generate(max_new_tokens=3)
            session.extend([end])
            before = len(session.token_ids)
            session.extend("more")
            text = tokenizer().decode(session.token_ids[before - 1 :])
            assert text == "<end>\n<user>more"
    finally:
        object.__setattr__(model.spec, "eos_token_ids", frozenset())


def test_text_without_template_is_left_as_it_is(model: Model) -> None:
    with Session(model, template=None) as session:
        session.extend("a th").extend("e b")
        assert session.token_ids == tokenizer()("a th")["input_ids"] + tokenizer()("e b")["input_ids"]


def test_a_model_without_template_takes_no_messages() -> None:
    bare = tokenizer()
    bare.chat_template = None
    model = wrap(build(), bare, memory="8MB")
    with Session(model) as session, pytest.raises(ModelError, match="no chat template"):
        session.extend(messages=[{"role": "user", "content": "x"}])
