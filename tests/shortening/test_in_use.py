"""Shortening where people use it: sessions, answers, batches, messages; and where only token ids come in, a refusal."""

from __future__ import annotations

from typing import Any

import pytest

import kvfold
from kvfold.errors import InputError, PolicyError
from kvfold.models.loader import Model
from kvfold.shortening.messages import shorten_messages
from kvfold.shortening.text import plan_of
from tests import tiny

DOCUMENT = "\n\n".join(
    f"The {thing} stands in room {number}. It is old. Nobody sees it."
    for number, thing in enumerate(("lamp", "bell", "boat", "clock", "drum", "flag", "globe", "harp"), 11)
)


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny.ready("llama")


def test_a_session_reads_the_shorter_text(model: Model) -> None:
    with kvfold.Session(model, "shorten(graph, 2x, least=64)", template=None) as session:
        session.extend(DOCUMENT)
        (done,) = session.shortened
        assert done.num_tokens <= done.num_original_tokens / 2 + 1
        assert session.token_ids == model.tokenizer(done.text, add_special_tokens=False)["input_ids"]
    with kvfold.Session(model, template=None) as plain:
        plain.extend(done.text)
        assert plain.token_ids == model.tokenizer(done.text, add_special_tokens=False)["input_ids"]


def test_what_is_not_compressed_is_not_shortened(model: Model) -> None:
    with kvfold.Session(model, "shorten(graph, 2x, least=64)", template=None) as session:
        session.extend(DOCUMENT, compress=False)
        session.extend(tiny.prompt(200))
        assert not session.shortened and len(session.token_ids) == 200 + len(model.tokenizer(DOCUMENT)["input_ids"])


def test_a_fork_has_its_own_list(model: Model) -> None:
    with kvfold.Session(model, "shorten(graph, 2x, least=64)", template=None) as session:
        session.extend(DOCUMENT)
        with session.fork() as branch:
            branch.extend(DOCUMENT)
            assert (len(session.shortened), len(branch.shortened)) == (1, 2)


def test_a_question_is_needed_where_the_selector_reads_one(model: Model) -> None:
    with kvfold.Session(model, "shorten(rank, 4x, least=64)", template=None) as session:
        with pytest.raises(InputError, match="give the question"):
            session.extend(DOCUMENT)
        assert not session.token_ids
        session.extend(DOCUMENT, question="Where is the boat?")
        assert "The boat stands in room 13." in session.shortened[0].text
        session.extend("A short text needs none.")


def test_answers_are_those_of_the_shorter_text(model: Model) -> None:
    questions = ["Where is the boat?", "Where is the harp?"]
    found = kvfold.answer(model, DOCUMENT, questions, "shorten(rank, 4x, least=64)", template=None, max_new_tokens=6)
    for question, reply in zip(questions, found.replies, strict=True):
        short = kvfold.shorten(DOCUMENT, "4x", "rank", question=question, tokenizer=model.tokenizer).text
        alone = kvfold.answer(model, short, question, template=None, max_new_tokens=6)
        assert reply.token_ids == alone.replies[0].token_ids


def test_a_batch_keeps_the_question_at_the_end_of_a_prompt(model: Model) -> None:
    asked = f"{DOCUMENT}\n\nWhere is the boat?"
    (reply,) = kvfold.generate(model, [asked], "shorten(rank, 2x, least=64)", template=None, max_new_tokens=4)
    (message,), (done,) = shorten_messages(
        [{"role": "user", "content": asked}], plan_of("rank", "2x"), tokenizer=model.tokenizer
    )
    assert done.num_tokens < done.num_original_tokens
    assert message["content"].endswith("Where is the boat?") and "The boat stands" in message["content"]
    (same,) = kvfold.generate(model, [message["content"]], template=None, max_new_tokens=4)
    assert reply.token_ids == same.token_ids


def test_instructions_and_replies_of_messages_stay() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": DOCUMENT},
        {"role": "user", "content": [{"type": "text", "text": DOCUMENT}, {"type": "image", "source": {}}]},
        {"role": "assistant", "content": DOCUMENT},
        {"role": "tool", "content": DOCUMENT},
    ]
    shorter, done = shorten_messages(messages, plan_of("graph", "2x"))
    assert (shorter[0], shorter[2]) == (messages[0], messages[2])
    assert shorter[1]["content"][0]["text"] == shorter[3]["content"] == done[0].text
    assert shorter[1]["content"][1] == {"type": "image", "source": {}}
    assert shorter[1]["content"][0]["text"].startswith("The lamp stands in room 11.")


def test_a_message_is_cut_alike_whatever_follows() -> None:
    first = {"role": "user", "content": DOCUMENT}
    alone, _ = shorten_messages([first], plan_of("graph", "2x"))
    more, _ = shorten_messages([first, {"role": "user", "content": DOCUMENT[::-1]}], plan_of("graph", "2x"))
    assert alone[0] == more[0]


def test_token_ids_are_refused(model: Model) -> None:
    ids = tiny.prompt(64)
    with pytest.raises(PolicyError, match=r"shorten the text first with kvfold\.shorten"):
        kvfold.compress(model, ids, "shorten(graph, 2x) + keydiff + 2x")
    with pytest.raises(PolicyError, match=r"shorten the text first with kvfold\.shorten"):
        kvfold.Cache(model, "shorten(graph, 2x)")


def test_a_session_of_a_file_shortens_on(model: Model, tmp_path: object) -> None:
    path = f"{tmp_path}/a.kvfold"
    with kvfold.Session(model, "shorten(graph, 2x, least=64) + int4", template=None) as session:
        session.extend(DOCUMENT).save(path)
        with kvfold.Session.load(model, path) as again:
            assert again.policy == session.policy and again.token_ids == session.token_ids
